//! `completions`: prints shell completions of the arguments.

use crate::args::{Cli, CompletionsArgs};
use crate::exit::{Answer, Failure, Outcome};
use clap::CommandFactory;
use serde::Serialize;

#[derive(Serialize)]
struct Completions {
    shell: String,
    script: String,
}

/// Runs the command `completions` and returns its output.
pub(crate) fn run(args: &CompletionsArgs, json: bool) -> Result<Answer, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "cargo-sdpa", &mut script);
    let script = String::from_utf8(script).map_err(|e| Failure::environment("completions", e))?;
    let told = Completions { shell: args.shell.to_string(), script };
    Answer::new(json, &told, || told.script.clone(), Outcome::Good)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;
    use clap_complete::Shell;

    #[test]
    fn every_shell_is_told_the_options_and_their_names() {
        for shell in Shell::value_variants() {
            let Ok(answer) = run(&CompletionsArgs { shell: *shell }, false) else { panic!("{shell}") };
            for word in ["score-mod", "language"] {
                assert!(answer.rendered.contains(word), "{shell} is not told {word}");
            }
            // Completions for Elvish and PowerShell do not include values.
            if !matches!(shell, Shell::Elvish | Shell::PowerShell) {
                for name in ["bshd", "bf16", "cudnn", "unified", "schedule"] {
                    assert!(answer.rendered.contains(name), "{shell} is not told {name}");
                }
            }
        }
    }
}
