//! The problems of `compile`: a TOML file whose tables are spelled like the options of the other commands.

use crate::args::{BackwardArgs, ProblemArgs};
use crate::exit::Mistakes;
use crate::file;
use crate::request::{Request, Wanted};
use sdpa::lower::Job;
use serde::Deserialize;
use std::path::Path;

/// A pass with the name of its problem.
pub(super) struct Named {
    pub(super) problem: String,
    pub(super) job: Job,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    problem: Vec<Problem>,
}

/// As on the command line.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Problem {
    name: Option<String>,
    shape: Vec<i64>,
    dtype: Option<String>,
    layout: Option<String>,
    #[serde(default)]
    score_mod: Vec<String>,
    #[serde(default)]
    mask: Vec<String>,
    #[serde(default)]
    bias: bool,
    #[serde(default)]
    stats: bool,
    /// The forward pass with stats, and the backward pass.
    #[serde(default)]
    backward: bool,
    #[serde(default)]
    wrt: Vec<String>,
    #[serde(default)]
    deterministic: bool,
}

/// Larger files hold something else.
const LARGEST: u64 = 16 << 20;

/// Every pass of every problem of a file; what is wrong are mistakes.
pub(super) fn read(path: &Path, mistakes: &mut Mistakes) -> Option<Vec<Named>> {
    let about = path.display();
    let file = mistakes.take(about, file::text(path, LARGEST).and_then(|text| toml::from_str::<File>(&text).map_err(|e| e.to_string())))?;
    if file.problem.is_empty() {
        mistakes.add(path.display(), "has no [[problem]]");
    }
    let mut all = Vec::new();
    for (n, problem) in file.problem.into_iter().enumerate() {
        let name = problem.name.clone().unwrap_or_else(|| format!("problem {}", n + 1));
        let mut own = Mistakes::default();
        let request = problem.request(&mut own);
        match own.finish(request) {
            Ok(request) => {
                all.push(Named { problem: name.clone(), job: request.problem.clone().into() });
                all.extend(request.backward.map(|b| Named { problem: name, job: b.problem.into() }));
            }
            Err(failure) => failure.lines().iter().for_each(|line| mistakes.add(format!("{name}: {}", line.about), &line.message)),
        }
    }
    Some(all)
}

impl Problem {
    fn request(self, mistakes: &mut Mistakes) -> Option<Request> {
        let shape = self.shape.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let args = ProblemArgs {
            input: None,
            shape: Some(shape),
            dtype: self.dtype,
            layout: self.layout,
            score_mod: self.score_mod,
            mask: self.mask,
            bias: self.bias,
            param: Vec::new(),
            scale: None,
            stats: self.stats || self.backward,
        };
        let gradient = BackwardArgs { backward: self.backward, wrt: self.wrt, deterministic: self.deterministic };
        Request::read(&args, &Wanted { gradient: Some(&gradient), stats: self.backward, ..Wanted::default() }, mistakes)
    }
}
