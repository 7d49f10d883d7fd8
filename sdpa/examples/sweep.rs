//! scratch sweep
use cudnn_graph::*;
use sdpa::exec::cudnn::plan::*;
use sdpa::lower::Form;
use sdpa::*;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let library = Library::load(&Search::default()).unwrap();
    let profile = DeviceProfile::from_json(&std::fs::read_to_string(&args[1]).unwrap()).unwrap();
    let compile = args.get(2).is_some_and(|a| a == "compile");
    let target = Target::Profile(&profile);
    let s = |b, hq, hkv, sq, skv, d, dv| Shape { batch: b, heads_q: hq, heads_kv: hkv, seq_q: sq, seq_kv: skv, dim_qk: d, dim_v: dv };
    let shapes = [
        s(1, 32, 8, 2048, 2048, 128, 128),
        s(2, 4, 2, 129, 257, 64, 64),
        s(1, 4, 4, 257, 129, 64, 64),
        s(1, 8, 2, 1, 500, 128, 128),
        s(1, 2, 2, 1, 1, 64, 64),
        s(1, 4, 4, 100, 100, 192, 128),
        s(1, 4, 1, 100, 100, 256, 256),
        s(1, 4, 1, 64, 64, 8, 24),
        s(1, 4, 4, 8, 8, 128, 128),
    ];
    let w = Mask::window;
    use Align::*;
    let masks: Vec<Vec<Mask>> = vec![
        vec![],
        vec![Mask::causal()],
        vec![Mask::causal_bottom_right()],
        vec![w(Some(32), Some(0), TopLeft)],
        vec![w(Some(32), Some(0), BottomRight)],
        vec![w(Some(16), Some(16), TopLeft)],
        vec![w(Some(16), None, TopLeft)],
        vec![w(None, Some(5), BottomRight)],
        vec![Mask::prefix_lm(20)],
        vec![Mask::prefix_lm(20), w(Some(32), None, TopLeft)],
        vec![Mask::prefix_lm(20), w(Some(32), Some(10), BottomRight)],
    ];
    for shape in shapes {
        println!("{shape:?}");
        for m in &masks {
            for stats in [false, true] {
                let mut spec = AttentionSpec::dense(DType::BF16, shape, Layout::Bshd);
                spec.masks = m.clone();
                spec.stats = stats;
                let p = spec.validate().unwrap();
                for form in [Form::Composite, Form::Unified] {
                    if form == Form::Unified && !library.version().at_least(9, 21) {
                        continue;
                    }
                    let r = ask(library, &target, &p, form, &Policy::default());
                    let text = match r {
                        Ok((_, planner)) => {
                            let mut t = planner.report().candidates.iter().map(|c| c.tag()).collect::<Vec<_>>().join(" ");
                            if compile {
                                let r = planner.first(&target);
                                t += &match r {
                                    Ok(p) => format!(" OK {}", p.engine().unwrap().tag()),
                                    Err(e) => format!(" FAIL {e}"),
                                };
                            }
                            t
                        }
                        Err(e) => format!("ERR {e}").replace('\n', "; "),
                    };
                    let names: Vec<String> = m.iter().map(|m| m.to_string()).collect();
                    println!("  {:<40} {stats} {form:<10} {text}", names.join("+"));
                }
            }
        }
    }
}
