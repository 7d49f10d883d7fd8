//! Engines are cuDNN's kernels and kernel generators: which ones it offers for a graph, which one a plan uses, and why not the others.

use crate::error::Error;
use crate::ffi::Library;
use crate::ffi::codes::{Attribute, AttributeType, BehaviorNote, HeurMode, Kind, KnobType, NumericalNote, Status};
use crate::ffi::descriptor::Descriptor;
use crate::ffi::log::{listen, reasons};
use crate::known_faults::KnownFault;
use serde::Serialize;
use std::fmt;

/// The heuristic that offers engine configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Source {
    /// Heuristics mode A: fast, best first.
    A,
    /// Heuristics mode B: slower, with more engines.
    B,
    /// Fallback heuristics: engines that are general rather than fast.
    Fallback,
    /// No heuristic: the configuration comes from the caller's [`Pin`].
    Pinned,
}

impl Source {
    /// The heuristics, in the order in which they are queried.
    const LISTS: [(Source, HeurMode); 3] = [(Source::A, HeurMode::A), (Source::B, HeurMode::B), (Source::Fallback, HeurMode::FALLBACK)];
}

/// An engine with its knobs that the caller requests by number.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize)]
pub struct Pin {
    /// The number by which cuDNN identifies the engine for the graph.
    pub engine: i64,
    /// Tuning knobs of the engine, with the value of each.
    pub knobs: Vec<(KnobType, i64)>,
}

/// Rules for accepting the engine configurations that cuDNN offers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
pub struct Policy {
    /// The only engine to use, with its knobs. Heuristics need not offer it.
    pub pin: Option<Pin>,
    /// The largest workspace that a plan may use, in bytes; `None` for no limit.
    pub max_workspace: Option<u64>,
    /// If true, only deterministic engines are used.
    pub deterministic: bool,
    /// Tags of engine configurations to skip: `eng2` skips all configurations of engine 2, `eng2_k24=7` one of them.
    pub avoid: Vec<String>,
    /// Tags of engine configurations to try before all others, most preferred first. They have the notation of [`Policy::avoid`].
    pub prefer: Vec<String>,
    /// If true, engines with [known faults](crate::known_faults) are used too.
    pub known_faults: bool,
    /// If true, shapes are dynamic: plans of graphs whose extents alone differ share compiled kernels (from cuDNN 9.5 on), and engines that cannot share
    /// them are not offered.
    // Left out of files if false, so that their keys are those of releases without it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dynamic_shapes: bool,
}

/// One engine with its knobs, offered by cuDNN.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Candidate {
    /// The first heuristic that offered this engine with these knobs.
    pub source: Source,
    /// The number by which cuDNN identifies the engine for the graph.
    pub engine: i64,
    /// Tuning knobs of the engine, with the value of each.
    pub knobs: Vec<(KnobType, i64)>,
    /// Size of the workspace in bytes, if known before compiling (from cuDNN 9.2 on).
    pub workspace: Option<u64>,
    /// Size of the shared memory that the engine uses, in bytes, if known before compiling (from cuDNN 9.2 on).
    pub shared_memory: Option<i64>,
    /// cuDNN's notes on the numerical properties of the engine, such as whether it is deterministic.
    pub numerical_notes: Vec<NumericalNote>,
    /// cuDNN's notes on properties of the engine other than its numerics.
    pub behavior_notes: Vec<BehaviorNote>,
    /// Whether the plan uses this engine configuration, or the reason why not.
    pub outcome: Outcome,
}

/// The outcome of an engine configuration that cuDNN offered for a graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The configuration was not tried, because an earlier one was chosen.
    NotTried,
    /// The plan uses this engine configuration.
    Chosen,
    /// The policy skipped the engine configuration, for this reason.
    PassedOver(String),
    /// cuDNN offered the engine configuration, and then reported that it does not support the graph.
    Refused {
        /// The status that cuDNN returned.
        status: Status,
        /// cuDNN's last-error message.
        text: String,
    },
    /// Building a plan from the engine configuration failed, for example in compilation. The graph may still be supported.
    Failed {
        /// The status that cuDNN returned.
        status: Status,
        /// cuDNN's last-error message.
        text: String,
    },
}

impl Candidate {
    /// Returns the engine and its knobs in the notation of NVIDIA's tools, such as `eng2_k24=7`.
    pub fn tag(&self) -> String {
        let mut tag = format!("eng{}", self.engine);
        for (knob, value) in &self.knobs {
            tag.push_str(&format!("_k{}={value}", knob.0));
        }
        tag
    }

    fn matches(&self, avoid: &str) -> bool {
        let tag = self.tag();
        tag == avoid || tag.starts_with(&format!("{avoid}_"))
    }
}

impl Policy {
    /// Sets the only engine to use, with its knobs.
    #[must_use]
    pub fn with_pin(mut self, pin: impl Into<Option<Pin>>) -> Policy {
        self.pin = pin.into();
        self
    }

    /// Sets the largest workspace that a plan may use, in bytes.
    #[must_use]
    pub fn with_max_workspace(mut self, max_workspace: impl Into<Option<u64>>) -> Policy {
        self.max_workspace = max_workspace.into();
        self
    }

    /// Sets whether only deterministic engines are used.
    #[must_use]
    pub fn with_deterministic(mut self, deterministic: bool) -> Policy {
        self.deterministic = deterministic;
        self
    }

    /// Sets the tags of engine configurations to skip: see [`Policy::avoid`].
    #[must_use]
    pub fn with_avoid(mut self, avoid: Vec<String>) -> Policy {
        self.avoid = avoid;
        self
    }

    /// Sets the tags of engine configurations to try before all others, most preferred first: see [`Policy::prefer`].
    #[must_use]
    pub fn with_prefer(mut self, prefer: Vec<String>) -> Policy {
        self.prefer = prefer;
        self
    }

    /// Sets whether engines with [known faults](crate::known_faults) are used too. Their results may be wrong, and they may access memory outside of
    /// their operands: this is for tests of engines.
    #[must_use]
    pub fn with_known_faults(mut self, known_faults: bool) -> Policy {
        self.known_faults = known_faults;
        self
    }

    /// Sets whether plans of graphs whose extents alone differ share compiled kernels: see [`Policy::dynamic_shapes`]. [`Plans`](crate::Plans) keeps them.
    /// It has no effect on programs.
    #[must_use]
    pub fn with_dynamic_shapes(mut self, dynamic_shapes: bool) -> Policy {
        self.dynamic_shapes = dynamic_shapes;
        self
    }

    /// Returns the position of an offer in the order of trying: cuDNN's own, except for preferred offers.
    fn rank(&self, candidate: &Candidate) -> usize {
        self.prefer.iter().position(|tag| candidate.matches(tag)).unwrap_or(self.prefer.len())
    }

    /// Returns the outcome of an engine configuration whose workspace of `bytes` bytes is above the limit; `None` if it is not.
    pub(crate) fn over_workspace(&self, bytes: u64) -> Option<Outcome> {
        let limit = self.max_workspace.filter(|&limit| bytes > limit)?;
        Some(Outcome::PassedOver(format!("its workspace of {bytes} bytes is over the limit of {limit}")))
    }

    fn verdict(&self, candidate: &Candidate, faults: &[&KnownFault]) -> Outcome {
        if !self.known_faults
            && let Some(fault) = faults.iter().find(|fault| fault.is_of(candidate.engine))
        {
            return Outcome::PassedOver(fault.reason());
        }
        if let Some(over) = candidate.workspace.and_then(|bytes| self.over_workspace(bytes)) {
            return over;
        }
        if self.deterministic && candidate.numerical_notes.contains(&NumericalNote::NONDETERMINISTIC) {
            return Outcome::PassedOver("it may give other bits on another run".to_owned());
        }
        match self.avoid.iter().find(|tag| candidate.matches(tag)) {
            Some(tag) => Outcome::PassedOver(format!("the policy avoids {tag}")),
            None => Outcome::NotTried,
        }
    }
}

/// Every engine configuration that cuDNN offered for a graph, with its outcome.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct EngineReport {
    /// The engine configurations that cuDNN offered, in the order in which they were tried.
    pub candidates: Vec<Candidate>,
    /// Heuristics that failed, each with cuDNN's error message.
    pub lists_refused: Vec<(Source, String)>,
    /// Messages that cuDNN logged; empty unless it offered no engine.
    pub said: Vec<String>,
}

impl EngineReport {
    /// Returns the engine configuration that the plan uses; `None` if none was chosen.
    pub fn chosen(&self) -> Option<&Candidate> {
        self.candidates.iter().find(|c| c.outcome == Outcome::Chosen)
    }
}

impl fmt::Display for EngineReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines: Vec<String> = Vec::new();
        for c in &self.candidates {
            let what = match &c.outcome {
                Outcome::NotTried => "not tried".to_owned(),
                Outcome::Chosen => "chosen".to_owned(),
                Outcome::PassedOver(why) => format!("passed over: {why}"),
                Outcome::Refused { status, text } => format!("refused: {status}, {text}"),
                Outcome::Failed { status, text } => format!("failed: {status}, {text}"),
            };
            lines.push(format!("{} ({:?}): {what}", c.tag(), c.source));
        }
        for (source, why) in &self.lists_refused {
            lines.push(format!("list {source:?}: {why}"));
        }
        if !self.said.is_empty() {
            lines.push(format!("cuDNN offers none: {}", self.said.join("; ")));
        }
        if lines.is_empty() {
            lines.push("cuDNN offers none, and gives no reason".to_owned());
        }
        f.write_str(&lines.join("\n"))
    }
}

/// The engine configurations that cuDNN offers for a graph, and their descriptors, from which plans are built.
pub(crate) struct Offers {
    pub(crate) report: EngineReport,
    pub(crate) configs: Vec<Descriptor>,
    /// The first failure of a heuristic other than *unsupported*; `None` if there was none.
    pub(crate) failed: Option<Error>,
}

/// Queries cuDNN's heuristics one after another for engine configurations. A configuration that two heuristics offer is kept once. `faults` are those
/// of the graph.
///
/// # Errors
/// Fails if memory runs out, and for other failures that every heuristic would repeat.
pub(crate) fn offers(
    library: &'static Library,
    graph: &Descriptor,
    profile: Option<&Descriptor>,
    policy: &Policy,
    faults: &[&KnownFault],
) -> Result<Offers, Error> {
    let mut found: Vec<(Candidate, Descriptor)> = Vec::new();
    let (mut lists_refused, mut failed) = (Vec::new(), None);
    let mut refused = |source: Source, e: Error| -> Result<(), Error> {
        if e.is_fatal() {
            return Err(e);
        }
        lists_refused.push((source, e.to_string()));
        if !e.is_unsupported() {
            failed.get_or_insert(e);
        }
        Ok(())
    };
    type List = (Source, Result<Vec<Descriptor>, Error>);
    let (lists, log): (Vec<List>, _) = listen(|| match &policy.pin {
        Some(pin) => vec![(Source::Pinned, pinned(library, graph, profile, pin).map(|config| vec![config]))],
        None => Source::LISTS.into_iter().map(|(source, mode)| (source, list(library, graph, profile, mode))).collect(),
    });
    for (source, configs) in lists {
        match configs {
            Ok(configs) => {
                for config in configs {
                    match describe(library, &config, source) {
                        Ok(mut candidate) => {
                            if found.iter().any(|(c, _)| c.engine == candidate.engine && c.knobs == candidate.knobs) {
                                continue;
                            }
                            candidate.outcome = policy.verdict(&candidate, faults);
                            found.push((candidate, config));
                        }
                        Err(e) => refused(source, e)?,
                    }
                }
            }
            Err(e) => refused(source, e)?,
        }
    }
    found.sort_by_key(|(candidate, _)| policy.rank(candidate));
    let (candidates, configs) = found.into_iter().unzip();
    let candidates: Vec<Candidate> = candidates;
    let said = if candidates.is_empty() { reasons(&log) } else { Vec::new() };
    Ok(Offers { report: EngineReport { candidates, lists_refused, said }, configs, failed })
}

fn list(library: &'static Library, graph: &Descriptor, profile: Option<&Descriptor>, mode: HeurMode) -> Result<Vec<Descriptor>, Error> {
    let mut heuristics = Descriptor::new(library, Kind::ENGINEHEUR)?;
    heuristics.set_descriptor(Attribute::ENGINEHEUR_OPERATION_GRAPH, graph)?;
    heuristics.set_code(Attribute::ENGINEHEUR_MODE, AttributeType::HEUR_MODE, mode.0)?;
    if let Some(profile) = profile {
        heuristics.set_descriptor(Attribute::ENGINEHEUR_DEVICEPROP, profile)?;
    }
    heuristics.finalize(&format!("mode {mode}"))?;
    heuristics.get_descriptors(Attribute::ENGINEHEUR_RESULTS, Kind::ENGINECFG, None)
}

/// Returns the configuration of a caller's pin.
fn pinned(library: &'static Library, graph: &Descriptor, profile: Option<&Descriptor>, pin: &Pin) -> Result<Descriptor, Error> {
    let mut engine = Descriptor::new(library, Kind::ENGINE)?;
    engine.set_descriptor(Attribute::ENGINE_OPERATION_GRAPH, graph)?;
    engine.set_i64(Attribute::ENGINE_GLOBAL_INDEX, &[pin.engine])?;
    if let Some(profile) = profile {
        engine.set_descriptor(Attribute::ENGINE_DEVICEPROP, profile)?;
    }
    engine.finalize(&format!("engine {}", pin.engine))?;
    let mut choices = Vec::with_capacity(pin.knobs.len());
    for (knob, value) in &pin.knobs {
        let mut choice = Descriptor::new(library, Kind::KNOB_CHOICE)?;
        choice.set_code(Attribute::KNOB_CHOICE_KNOB_TYPE, AttributeType::KNOB_TYPE, knob.0)?;
        choice.set_i64(Attribute::KNOB_CHOICE_KNOB_VALUE, &[*value])?;
        choice.finalize(&format!("knob {knob}"))?;
        choices.push(choice);
    }
    let mut config = Descriptor::new(library, Kind::ENGINECFG)?;
    config.set_and_keep(Attribute::ENGINECFG_ENGINE, vec![engine])?;
    config.set_and_keep(Attribute::ENGINECFG_KNOB_CHOICES, choices)?;
    config.finalize(&format!("engine {} with {} knobs", pin.engine, pin.knobs.len()))?;
    Ok(config)
}

/// More knobs than any engine has. cuDNN returns their number only with an array for them.
const KNOBS: usize = 64;

fn describe(library: &'static Library, config: &Descriptor, source: Source) -> Result<Candidate, Error> {
    let engines = config.get_descriptors(Attribute::ENGINECFG_ENGINE, Kind::ENGINE, Some(1))?;
    let engine = engines.first().ok_or_else(|| Error::PlanJson("an engine configuration has no engine".to_owned()))?;
    let mut knobs = Vec::new();
    for choice in config.get_descriptors(Attribute::ENGINECFG_KNOB_CHOICES, Kind::KNOB_CHOICE, Some(KNOBS))? {
        let types = choice.get_codes(Attribute::KNOB_CHOICE_KNOB_TYPE, AttributeType::KNOB_TYPE)?;
        knobs.extend(types.first().map(|&ty| (KnobType(ty), choice.get_i64(Attribute::KNOB_CHOICE_KNOB_VALUE).unwrap_or(0))));
    }
    knobs.sort();
    let early = library.version() >= Attribute::ENGINECFG_WORKSPACE_SIZE.since();
    let notes = |attribute, ty| engine.get_codes(attribute, ty).unwrap_or_default();
    Ok(Candidate {
        source,
        engine: engine.get_i64(Attribute::ENGINE_GLOBAL_INDEX)?,
        knobs,
        workspace: if early { config.get_i64(Attribute::ENGINECFG_WORKSPACE_SIZE).ok().and_then(|n| u64::try_from(n).ok()) } else { None },
        shared_memory: if early { config.get_i32(Attribute::ENGINECFG_SHARED_MEMORY_USED).ok().map(i64::from) } else { None },
        numerical_notes: notes(Attribute::ENGINE_NUMERICAL_NOTE, AttributeType::NUMERICAL_NOTE).into_iter().map(NumericalNote).collect(),
        behavior_notes: notes(Attribute::ENGINE_BEHAVIOR_NOTE, AttributeType::BEHAVIOR_NOTE).into_iter().map(BehaviorNote).collect(),
        outcome: Outcome::NotTried,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate() -> Candidate {
        Candidate {
            source: Source::A,
            engine: 2,
            knobs: vec![(KnobType::KERNEL_CFG, 7)],
            workspace: Some(1000),
            shared_memory: None,
            numerical_notes: vec![NumericalNote::TENSOR_CORE, NumericalNote::NONDETERMINISTIC],
            behavior_notes: Vec::new(),
            outcome: Outcome::NotTried,
        }
    }

    #[test]
    fn a_policy_passes_over_what_it_names() {
        let passes = |policy: Policy| policy.verdict(&candidate(), &[]) == Outcome::NotTried;
        assert!(passes(Policy::default()));
        assert!(passes(Policy { max_workspace: Some(1000), ..Policy::default() }));
        assert!(!passes(Policy { max_workspace: Some(999), ..Policy::default() }));
        assert!(!passes(Policy { deterministic: true, ..Policy::default() }));
        assert!(!passes(Policy { avoid: vec!["eng2".to_owned()], ..Policy::default() }));
        assert!(!passes(Policy { avoid: vec!["eng2_k24=7".to_owned()], ..Policy::default() }));
        assert!(passes(Policy { avoid: vec!["eng2_k24=70".to_owned(), "eng".to_owned(), "eng22".to_owned()], ..Policy::default() }));
    }

    #[test]
    fn an_engine_with_a_known_fault_is_passed_over() {
        let of = |engine| KnownFault { engine, ..KnownFault::ALL[0] };
        let taken = |policy: &Policy, fault: &KnownFault| policy.verdict(&candidate(), &[fault]) == Outcome::NotTried;
        for (engine, faulty) in [(Some(2), true), (Some(3), false), (None, true)] {
            assert_eq!(taken(&Policy::default(), &of(engine)), !faulty, "{engine:?}");
            assert!(taken(&Policy::default().with_known_faults(true), &of(engine)), "{engine:?}");
        }
    }

    #[test]
    fn fixed_shapes_leave_the_keys_of_files_as_they_are() {
        let text = |policy: &Policy| serde_json::to_string(policy).unwrap();
        assert!(!text(&Policy::default()).contains("dynamic_shapes"));
        assert!(text(&Policy::default().with_dynamic_shapes(true)).contains(r#""dynamic_shapes":true"#));
    }

    #[test]
    fn what_is_preferred_comes_first() {
        let policy = Policy { prefer: vec!["eng1".to_owned(), "eng2_k24=7".to_owned()], ..Policy::default() };
        let other = Candidate { engine: 1, ..candidate() };
        let third = Candidate { engine: 3, ..candidate() };
        assert!(policy.rank(&other) < policy.rank(&candidate()));
        assert!(policy.rank(&candidate()) < policy.rank(&third));
    }
}
