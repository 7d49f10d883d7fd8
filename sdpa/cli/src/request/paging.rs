//! The paged KV cache of a request: page size, number of pages, and page table.

use crate::args::ProblemArgs;
use crate::exit::Mistakes;
use crate::file;
use crate::header::Header;
use sdpa::paged::PAGE_TABLE;
use sdpa::{AttentionSpec, Layout, Paged};
use std::path::Path;

/// The paged KV cache of a request: page size, number of pages and page table.
#[derive(Clone, Debug)]
pub(crate) struct Paging {
    /// `None` if it could not be parsed.
    page_size: Option<i64>,
    pages: Option<i64>,
    table: Table,
    /// The option or file that mistakes in the table are attributed to.
    about: String,
}

/// The source of the page table.
#[derive(Clone, Debug)]
enum Table {
    /// The pages are in pseudorandom order.
    Random,
    /// The page table is the input's tensor, which has this number of pages per batch entry.
    Input(Option<i64>),
    /// The page table is in a file. The field has the pages of each batch entry, if they could be read.
    File(Option<Vec<Vec<i32>>>),
}

/// The source of the contents of a page table, as far as they are known.
pub(crate) enum Source {
    /// A table with this number of pages in pseudorandom order.
    Random(i64),
    /// The tensor `page_table` in the input file.
    Input,
    /// The pages of each batch entry, from the user's file; `None` if they could not be read.
    Given(Option<Vec<Vec<i32>>>),
}

/// A larger file does not hold a page table.
const LARGEST: u64 = 256 << 20;

/// Parses a number of tokens or pages.
fn number(text: &str) -> Result<i64, String> {
    let number: i64 = text.trim().parse().map_err(|_| format!("got {text:?}, expected an integer"))?;
    if (1..=i64::from(i32::MAX)).contains(&number) { Ok(number) } else { Err(format!("got {number}, expected between 1 and {}", i32::MAX)) }
}

/// Reads the rows of a file: one line per batch entry, numbers separated by blanks or commas.
fn rows(path: &Path) -> Result<Vec<Vec<i32>>, String> {
    let text = file::text(path, LARGEST)?;
    let words = |line: &'_ str| -> Vec<String> {
        line.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty()).map(str::to_owned).collect()
    };
    let rows: Vec<Vec<String>> = text.lines().map(words).filter(|row| !row.is_empty()).collect();
    let wrong: Vec<String> = rows.iter().flatten().filter(|word| word.parse::<i32>().is_err()).map(|word| format!("{word:?}")).collect();
    if !wrong.is_empty() {
        let (shown, more) = wrong.split_at(wrong.len().min(8));
        let more = if more.is_empty() { String::new() } else { format!(" and {} more", more.len()) };
        return Err(format!("got {}{more}, expected page indices as i32, a line for each batch entry", crate::table::list(shown)));
    }
    if rows.is_empty() {
        return Err("got no line, expected page indices, one line for each batch entry".to_owned());
    }
    Ok(rows.iter().map(|row| row.iter().filter_map(|word| word.parse().ok()).collect()).collect())
}

/// Returns the number of pages per entry in the input's table. A missing table is reported with the other parameters.
fn columns(header: &Header, mistakes: &mut Mistakes) -> Option<i64> {
    let shape = header.find(PAGE_TABLE)?.shape;
    let columns = shape.last().copied().filter(|columns| (1..=i64::from(i32::MAX)).contains(columns));
    if columns.is_none() {
        mistakes.add(header.path.display(), format!("{PAGE_TABLE}: got shape {shape:?}, expected [batch, pages of a batch entry]"));
    }
    columns
}

impl Paging {
    /// Reads the options; returns `None` if keys are not paged.
    pub(super) fn read(args: &ProblemArgs, header: Option<&Header>, mistakes: &mut Mistakes) -> Option<Paging> {
        let Some(text) = &args.paged else {
            for (option, given) in [("--pages", args.pages.is_some()), ("--page-table", args.page_table.is_some())] {
                if given {
                    mistakes.add(option, "requires --paged");
                }
            }
            return None;
        };
        let page_size = mistakes.take("--paged", number(text));
        let pages = args.pages.as_deref().and_then(|text| mistakes.take("--pages", number(text)));
        if args.pages.is_some() && args.input.is_some() {
            mistakes.add("--pages", "cannot be combined with --input, which contains the pages");
        }
        let (table, about) = match &args.page_table {
            Some(path) => {
                let about = format!("--page-table {}", path.display());
                (Table::File(mistakes.take(&about, rows(path))), about)
            }
            None if args.input.is_some() => (
                Table::Input(header.and_then(|header| columns(header, mistakes))),
                header.map_or_else(String::new, |header| header.path.display().to_string()),
            ),
            None => (Table::Random, "--pages".to_owned()),
        };
        Some(Paging { page_size, pages, table, about })
    }

    /// Returns the option or file that mistakes in the page table are attributed to.
    pub(crate) fn about(&self) -> &str {
        &self.about
    }

    /// Returns the number of pages per batch entry, if the table determines it.
    fn columns(&self) -> Option<i64> {
        match &self.table {
            Table::Random | Table::File(None) => None,
            Table::Input(columns) => *columns,
            Table::File(Some(rows)) => rows.iter().map(|row| row.len() as i64).max(),
        }
    }

    /// Returns the extents of keys or values for `batch` entries, from those of their page pool.
    pub(super) fn dims(&self, [_, heads, _, dim]: [i64; 4], batch: Option<i64>) -> Option<[i64; 4]> {
        Some([batch?, heads, self.columns()?.checked_mul(self.page_size.filter(|size| *size >= 1)?)?, dim])
    }

    /// Validates the page pools of an input.
    pub(super) fn judge(&self, [k, v]: [Option<[i64; 4]>; 2], about: &str, mistakes: &mut Mistakes) {
        for (name, container) in [("k", k), ("v", v)] {
            if let (Some(container), Some(page_size)) = (container, self.page_size)
                && container[2] != page_size
            {
                mistakes.add(about, format!("{name}: got pages of {} tokens, expected {page_size}, the value of --paged", container[2]));
            }
        }
        if let (Some(k), Some(v)) = (k, v)
            && k[0] != v[0]
        {
            mistakes.add(about, format!("v: got {} pages, expected {}, as k has", v[0], k[0]));
        }
    }

    /// Validates the rows of a table for a problem of these extents (batch, heads_q, seq_q, seq_kv).
    pub(super) fn judge_rows(&self, [batch, _, _, seq_kv]: [i64; 4], mistakes: &mut Mistakes) {
        let Table::File(Some(rows)) = &self.table else { return };
        if rows.len() as i64 != batch {
            mistakes.add(&self.about, format!("got {} lines with pages, expected {batch}, one for each batch entry", rows.len()));
        }
        let most = self.per_entry(seq_kv);
        if let Some((n, row)) = rows.iter().enumerate().find(|(_, row)| row.len() as i64 > most) {
            mistakes.add(&self.about, format!("line {}: got {} pages, expected at most {most} for {seq_kv} keys", n + 1, row.len()));
        }
    }

    fn per_entry(&self, seq_kv: i64) -> i64 {
        self.paged(1).pages_of(seq_kv)
    }

    fn paged(&self, pages: i64) -> Paged {
        Paged::new(self.page_size.unwrap_or(1), pages)
    }

    /// Returns a paged cache without errors, to validate options that do not depend on its extents.
    pub(super) fn any(&self) -> Paged {
        Paged::new(self.paged(1).page_size.clamp(1, i64::from(i32::MAX)), 1)
    }

    /// Returns the number of pages: that of the page pool, else the option's, else as many as all keys need.
    fn pages(&self, [batch, seq_kv]: [i64; 2], container: Option<[i64; 4]>) -> i64 {
        container.map(|container| container[0]).or(self.pages).unwrap_or_else(|| batch.saturating_mul(self.per_entry(seq_kv)))
    }

    /// Returns the contents of the page table for a problem of these extents (batch, heads_q, seq_q, seq_kv).
    pub(crate) fn source(&self, [batch, _, _, seq_kv]: [i64; 4]) -> Source {
        match &self.table {
            Table::Random => Source::Random(self.pages([batch, seq_kv], None)),
            Table::Input(_) => Source::Input,
            Table::File(rows) => Source::Given(rows.clone()),
        }
    }

    /// Makes a specification paged; `container` is the page pool of the input's keys.
    pub(super) fn place(&self, spec: &mut AttentionSpec, layout: Layout, container: Option<[i64; 4]>) {
        let [batch, _, seq_kv, _] = spec.k.dims;
        let paged = self.paged(self.pages([batch, seq_kv], container));
        for tensor in [&mut spec.k, &mut spec.v] {
            *tensor = paged.dense(tensor.dims, layout);
        }
        spec.paged = Some(paged);
    }
}
