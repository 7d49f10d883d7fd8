//! The ledgers of this release.

use conformance::golden;
use sdpa::cudnn::ledger::Ledger;

/// Where docs/ledger.md has the table.
const BEGINS: &str = "<!-- made by tests/host/ledger.rs -->\n";
const ENDS: &str = "<!-- end -->\n";

#[test]
fn the_page_has_each_ledger() {
    let mut made = "| cuDNN | compute capability | made on | right | wrong | pairs proven |\n|---|---|---|---|---|---|\n".to_owned();
    for (cudnn, sm) in Ledger::all_released() {
        let ledger = Ledger::released(cudnn, sm).unwrap();
        let about = ledger.about();
        let (major, minor) = (sm / 10, sm % 10);
        made.push_str(&format!(
            "| {cudnn} | {major}.{minor} | {} | {} | {} | {} |\n",
            about.device,
            about.right,
            about.wrong,
            ledger.pairs()
        ));
    }
    let page = std::fs::read_to_string(golden::repository("docs/ledger.md")).unwrap();
    let (before, rest) = page.split_once(BEGINS).unwrap();
    let (_, after) = rest.split_once(ENDS).unwrap();
    golden::check("docs/ledger.md", &format!("{before}{BEGINS}{made}{ENDS}{after}")).unwrap_or_else(|e| panic!("{e}"));
}
