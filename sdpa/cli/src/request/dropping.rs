//! Dropout of a request: probability, seed and offset.

use crate::args::ProblemArgs;
use crate::exit::Mistakes;
use sdpa::{DROPOUT_OFFSET, DROPOUT_SEED, Dropout};

/// The dropout options of a request: probability, seed and offset.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Dropping {
    pub(super) dropout: Option<Dropout>,
    seed: i64,
    offset: i64,
}

impl Dropping {
    pub(super) fn read(args: &ProblemArgs, mistakes: &mut Mistakes) -> Dropping {
        let p = args.dropout.as_deref().map(|text| {
            let p = text.trim().parse::<f32>().ok().filter(|&p| p > 0.0 && p < 1.0);
            mistakes.take("--dropout", p.ok_or_else(|| format!("got {text:?}, expected a probability above 0 and below 1")))
        });
        let mut number = |option: &str, text: Option<&str>| {
            if text.is_some() && args.dropout.is_none() {
                mistakes.add(option, "requires --dropout");
            }
            let number =
                text.map_or(Ok(0), |text| text.trim().parse::<i64>().map_err(|_| format!("got {text:?}, expected an integer of 64 bits")));
            mistakes.take(option, number).unwrap_or(0)
        };
        let seed = number("--dropout-seed", args.dropout_seed.as_deref());
        let offset = number("--dropout-offset", args.dropout_offset.as_deref());
        Dropping { dropout: p.flatten().map(Dropout::new), seed, offset }
    }

    /// Returns the dropout seed or offset if `name` is the name of its parameter, and otherwise `None`.
    pub(crate) fn named(self, name: &str) -> Option<i64> {
        self.dropout?;
        [(DROPOUT_SEED, self.seed), (DROPOUT_OFFSET, self.offset)].into_iter().find(|(own, _)| *own == name).map(|(_, number)| number)
    }
}
