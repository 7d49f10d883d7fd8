//! Invalid files with valid checksums, which no writer makes. Reading them returns typed errors, never panics, and does not allocate for absent data.

use super::*;
use proptest::prelude::*;
use proptest::test_runner::RngSeed;

/// The parts of a file, which a test reassembles with valid checksums.
#[derive(Clone, Debug)]
struct Pieces {
    version: u32,
    header_length: u32,
    header: Vec<u8>,
    records: u32,
    index_length: u32,
    index: Vec<u8>,
    payloads: Vec<u8>,
}

impl Pieces {
    /// Returns the parts of a valid file with three records.
    fn good() -> Pieces {
        let bytes = image(records(3));
        let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let header_length = number(12);
        let counts = 16 + header_length as usize + 32;
        let index_length = number(counts + 4);
        let payloads = counts + 8 + index_length as usize + 32;
        Pieces {
            version: number(8),
            header_length,
            header: bytes[16..counts - 32].to_vec(),
            records: number(counts),
            index_length,
            index: bytes[counts + 8..payloads - 32].to_vec(),
            payloads: bytes[payloads..].to_vec(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = b"\x89sdpa\r\n\x1a".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.header_length.to_le_bytes());
        out.extend(&self.header);
        out.extend(Digest::of(&out).0);
        out.extend(self.records.to_le_bytes());
        out.extend(self.index_length.to_le_bytes());
        out.extend(&self.index);
        out.extend(Digest::of(&out).0);
        out.extend(&self.payloads);
        out
    }

    fn set_header(&mut self, text: &str) {
        self.header = text.as_bytes().to_vec();
        self.header_length = text.len() as u32;
    }

    /// Returns the start and end of the first record's label in the index.
    fn label(&self) -> (usize, usize) {
        let length = u32::from_le_bytes(self.index[32..36].try_into().unwrap());
        (36, 36 + length as usize)
    }
}

/// A change that makes a valid file invalid.
type Change = fn(&mut Pieces);

/// Opens a file and reads everything. Checks that no returned record has a wrong checksum.
fn fate(path: &Path, bytes: &[u8]) -> Result<(), PlanFileError> {
    put(path, bytes);
    let file = PlanFile::open(path)?;
    for entry in file.entries() {
        let payload = file.read(&entry.key)?.unwrap();
        assert_eq!(payload.len() as u64, entry.bytes);
        assert!(bytes.windows(32).any(|window| window == Digest::of(&payload).0));
    }
    Ok(())
}

#[test]
fn the_format_is_as_documented() {
    assert_eq!(Pieces::good().bytes(), image(records(3)));
}

#[test]
fn every_field_that_breaks_its_rule_is_named() {
    let cases: [(&str, Change); 16] = [
        ("format version", |p| p.version = 0),
        ("length of the header", |p| p.header_length = u32::MAX),
        ("header", |p| p.set_header("[]")),
        ("header", |p| p.set_header(&"[".repeat(1 << 19))),
        ("header", |p| p.set_header(r#"{"cudnn":"9.19.0","profile":"{}","lowering":1,"more":0}"#)),
        ("device profile", |p| p.set_header(r#"{"cudnn":"9.19.0","profile":"{}","lowering":1}"#)),
        ("number of records", |p| p.records = u32::MAX),
        ("length of the index", |p| p.records = 1 << 16),
        ("length of the index", |p| p.index_length = u32::MAX),
        ("record 2 of the index", |p| {
            let (begin, end) = p.label();
            let last = p.index.len() - (32 + 4 + (end - begin) + 16 + 32);
            p.index[last + 32..last + 36].copy_from_slice(&1024_u32.to_le_bytes());
        }),
        ("index", |p| {
            // Shorten the header by as many bytes as the index grows, so that payloads keep their offsets.
            p.index.push(0);
            p.index_length += 1;
            p.set_header(&String::from_utf8(p.header.clone()).unwrap().replace("9.19.0", "9.19."));
        }),
        ("length of a label", |p| p.index[32..36].fill(255)),
        ("label of record 0", |p| p.index[36] = 255),
        ("offset of record 0", |p| {
            let (_, end) = p.label();
            p.index[end..end + 8].fill(255);
        }),
        ("offset of record 0", |p| {
            let (_, end) = p.label();
            p.index[end..end + 8].fill(0);
        }),
        ("length of a payload", |p| {
            let (_, end) = p.label();
            p.index[end + 8..end + 16].fill(255);
        }),
    ];
    let (_folder, path) = place();
    for (field, change) in cases {
        let mut pieces = Pieces::good();
        change(&mut pieces);
        match fate(&path, &pieces.bytes()) {
            Err(PlanFileError::Corrupt { what, .. }) => assert_eq!(what, field),
            other => panic!("{field}: {other:?}"),
        }
    }
}

#[test]
fn keys_ascend() {
    let (_folder, path) = place();
    let mut pieces = Pieces::good();
    let (_, end) = pieces.label();
    let first: Vec<u8> = pieces.index[..32].to_vec();
    // The second record gets the key of the first.
    pieces.index[end + 48..end + 80].copy_from_slice(&first);
    assert!(matches!(fate(&path, &pieces.bytes()), Err(PlanFileError::Corrupt { what, .. }) if what == "key of record 1"));
}

#[test]
fn what_a_file_only_claims_to_have_is_cut_off() {
    let (_folder, path) = place();
    let mut pieces = Pieces::good();
    pieces.header_length = 1 << 20;
    assert!(matches!(fate(&path, &pieces.bytes()), Err(PlanFileError::Truncated { what, .. }) if what == "header"));
    let mut pieces = Pieces::good();
    (pieces.records, pieces.index_length) = (1 << 16, 1 << 26);
    assert!(matches!(fate(&path, &pieces.bytes()), Err(PlanFileError::Truncated { what, .. }) if what == "index"));
    let mut pieces = Pieces::good();
    let at = pieces.index.len() - 40;
    pieces.index[at..at + 8].copy_from_slice(&(1_u64 << 26).to_le_bytes());
    assert!(matches!(fate(&path, &pieces.bytes()), Err(PlanFileError::Truncated { what, .. }) if what == "payloads"));
}

/// Generates byte edits: position and value.
fn edits() -> impl Strategy<Value = Vec<(prop::sample::Index, u8)>> {
    proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)
}

fn edit(bytes: &mut [u8], edits: &[(prop::sample::Index, u8)]) {
    for (at, to) in edits {
        let at = at.index(bytes.len());
        bytes[at] = *to;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, rng_seed: RngSeed::Fixed(1), ..ProptestConfig::default() })]

    #[test]
    fn garbage_is_refused(lead in 0_usize..17, garbage in proptest::collection::vec(any::<u8>(), 0..400)) {
        let (_folder, path) = place();
        let good = image(Vec::new());
        prop_assert!(fate(&path, &[&good[..lead], &garbage[..]].concat()).is_err());
        prop_assert!(fate(&path, &garbage).is_err());
    }

    #[test]
    fn changes_that_no_checksum_sees_never_panic(header in edits(), index in edits(), both in any::<bool>(), n in (0_u32..6, 0_u32..600)) {
        let (_folder, path) = place();
        let mut pieces = Pieces::good();
        edit(&mut pieces.index, &index);
        if both {
            edit(&mut pieces.header, &header);
            (pieces.records, pieces.index_length) = n;
        }
        let _ = fate(&path, &pieces.bytes());
    }
}
