//! `cache info` and `cache clear`: the kernel cache on disk.

use crate::exit::{Answer, Failure, Mistakes, Outcome};
use crate::memory::human;
use crate::table::Table;
use sdpa::cuda::{KernelCache, Usage};
use serde::Serialize;

/// Returns the disk cache of kernels that the environment variables select. It adds a mistake for a variable with an invalid value.
pub(crate) fn of_user(mistakes: &mut Mistakes) -> Option<KernelCache> {
    KernelCache::of_user().unwrap_or_else(|e| {
        mistakes.add(e.variable, format!("got {:?}, expected {}", e.value, e.expected));
        None
    })
}

/// The folder, the limit and the size of the kernel cache on disk.
#[derive(Debug, Serialize)]
pub(crate) struct KernelCacheFacts {
    folder: String,
    limit_bytes: u64,
    kernels: usize,
    bytes: u64,
    /// The reason why the folder is refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<String>,
}

impl KernelCacheFacts {
    pub(crate) fn of(cache: &KernelCache) -> KernelCacheFacts {
        let (usage, refused) = match cache.usage() {
            Ok(usage) => (usage, None),
            Err(e) => (Usage::default(), Some(e.to_string())),
        };
        let (folder, limit_bytes) = (cache.folder().display().to_string(), cache.limit());
        KernelCacheFacts { folder, limit_bytes, kernels: usage.records, bytes: usage.bytes, refused }
    }

    pub(crate) fn text(&self) -> String {
        match &self.refused {
            Some(why) => format!("not used: {why}"),
            None => format!("{}, {}; limit {}", self.count(), self.folder, human(u128::from(self.limit_bytes))),
        }
    }

    fn count(&self) -> String {
        counted(self.kernels, self.bytes)
    }
}

fn counted(kernels: usize, bytes: u64) -> String {
    format!("{kernels} {}, {}", if kernels == 1 { "kernel" } else { "kernels" }, human(u128::from(bytes)))
}

/// The answer of `cache info` and `cache clear`.
#[derive(Serialize)]
struct CacheAnswer {
    /// Whether the cache is on.
    on: bool,
    #[serde(flatten)]
    facts: Option<KernelCacheFacts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cleared: Option<Cleared>,
}

#[derive(Serialize)]
struct Cleared {
    kernels: usize,
    bytes: u64,
}

/// Prints the size of the kernel cache on disk. If `clear` is set, it deletes the kernels first.
pub(crate) fn run(clear: bool, json: bool) -> Result<Answer, Failure> {
    let mut mistakes = Mistakes::default();
    let cache = of_user(&mut mistakes);
    mistakes.finish(Some(()))?;
    let cleared = match cache.as_ref().filter(|_| clear).map(KernelCache::clear).transpose() {
        Ok(usage) => usage.map(|Usage { records, bytes }| Cleared { kernels: records, bytes }),
        Err(e) => return Err(Failure::environment("the kernel cache", e)),
    };
    let answer = CacheAnswer { on: cache.is_some(), facts: cache.as_ref().map(KernelCacheFacts::of), cleared };
    let text = || {
        let mut table = Table::default();
        match &answer.facts {
            None => table.row("kernels", "no cache: SDPA_CACHE is off, or this user has no home"),
            Some(facts) => {
                table.rows("cleared", answer.cleared.iter().map(|cleared| counted(cleared.kernels, cleared.bytes)));
                table.row("folder", facts.folder.as_str());
                table.row("kernels", facts.refused.as_ref().map_or_else(|| facts.count(), |why| format!("not used: {why}")));
                table.row("limit", human(u128::from(facts.limit_bytes)));
            }
        }
        table.render()
    };
    Answer::new(json, &answer, text, Outcome::Good)
}
