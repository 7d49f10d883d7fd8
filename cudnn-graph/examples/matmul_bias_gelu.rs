//! smoke
use cudnn_graph::ir::Mode;
use cudnn_graph::*;
use std::sync::Arc;
fn main() {
    let library = Library::load(&Search::default()).unwrap();
    println!("{} {:?} {:?}", library.version(), library.path(), library.companions());
    let profile = DeviceProfile::from_json(&std::fs::read_to_string(std::env::args().nth(1).unwrap()).unwrap()).unwrap();
    let mut g = Graph::new();
    let a = g.input("a", DType::BF16, [1, 256, 128]);
    let b = g.input("b", DType::BF16, [1, 128, 512]);
    let bias = g.input("bias", DType::BF16, [1, 1, 512]);
    let c = g.matmul(a, b);
    let c = g.pointwise(Mode::Add, &[c, bias]);
    let y = g.pointwise(Mode::GeluFwd, &[c]);
    g.output(y, "y", DType::BF16);
    let g = Arc::new(g.verify().unwrap());
    let target = Target::Profile(&profile);
    let p = Planner::new(library, g, &target, &Policy::default()).unwrap();
    println!("{}", p.program());
    println!("{}", p.report());
    let t = std::time::Instant::now();
    let plan = p.first(&target).unwrap();
    println!("{:?} {} {}", t.elapsed(), plan.workspace_bytes(), plan.report());
    println!("{}", plan.to_json().unwrap().len());
}
