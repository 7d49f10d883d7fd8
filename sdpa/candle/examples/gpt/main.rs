//! A small GPT, trained from scratch on generated text, on a CPU in minutes: RoPE or ALiBi, GQA, packed sequences.
//!
//! ```text
//! cargo run --release --package sdpa-candle --example gpt -- --steps 400 --checkpoint gpt.safetensors --curve loss.svg
//! ```

mod curve;
mod model;
mod text;

use candle_core::{Device, Result, Tensor, bail};
use indicatif::{ProgressBar, ProgressStyle};
use model::{AdamW, Config, Model};
use std::collections::HashMap;
use std::io::IsTerminal;
use std::time::Instant;

const USAGE: &str = "gpt [OPTIONS]
  --steps N            steps to have done at the end (200)
  --tokens N           tokens of a step (1024)
  --seed N             of weights and text (1)
  --attention ours|plain   one fused attention, or candle's own ops (ours)
  --position rotary|alibi  (rotary)
  --softcap X          cap on scores (none)
  --checkpoint FILE    goes on from it if it is there, and writes it at the end
  --losses FILE        writes the loss of each step, a line each
  --curve FILE.svg     draws them";

#[derive(Debug)]
struct Options {
    steps: u64,
    tokens: usize,
    seed: u64,
    config: Config,
    checkpoint: Option<String>,
    losses: Option<String>,
    curve: Option<String>,
}

fn options(arguments: impl Iterator<Item = String>) -> Result<Options> {
    let config = Config { layers: 4, heads: 8, heads_kv: 2, dim: 16, alibi: false, softcap: None, plain: false };
    let mut options = Options { steps: 200, tokens: 1024, seed: 1, config, checkpoint: None, losses: None, curve: None };
    let mut arguments = arguments;
    while let Some(name) = arguments.next() {
        if name == "--help" {
            bail!("{USAGE}");
        }
        let Some(value) = arguments.next() else { bail!("{name} is without a value\n{USAGE}") };
        let number = || match value.parse::<u64>() {
            Ok(number) if number > 0 => Ok(number),
            _ => Err(candle_core::Error::msg(format!("{name}: got {value}, expected an integer above 0"))),
        };
        let one_of = |first: &str, second: &str| match &value {
            x if x == first => Ok(false),
            x if x == second => Ok(true),
            x => Err(candle_core::Error::msg(format!("{name}: got {x}, expected {first} or {second}"))),
        };
        match name.as_str() {
            "--steps" => options.steps = number()?,
            "--tokens" => options.tokens = number()? as usize,
            "--seed" => options.seed = number()?,
            "--attention" => options.config.plain = one_of("ours", "plain")?,
            "--position" => options.config.alibi = one_of("rotary", "alibi")?,
            "--softcap" => match value.parse::<f32>() {
                Ok(cap) if cap > 0. && cap.is_finite() => options.config.softcap = Some(cap),
                _ => bail!("--softcap: got {value}, expected a number above 0"),
            },
            "--checkpoint" => options.checkpoint = Some(value),
            "--losses" => options.losses = Some(value),
            "--curve" => options.curve = Some(value),
            _ => bail!("there is no option {name}\n{USAGE}"),
        }
    }
    Ok(options)
}

/// A training run: model weights, the state of the optimiser, and the losses so far.
struct Run {
    model: Model,
    adam: AdamW,
    losses: Vec<f32>,
}

impl Run {
    fn new(options: &Options) -> Result<Run> {
        let model = Model::new(options.config.clone(), options.seed)?;
        let adam = AdamW::new(&model.weights)?;
        Ok(Run { model, adam, losses: Vec::new() })
    }

    fn step(&mut self, options: &Options) -> Result<f32> {
        let step = self.losses.len() as u64 + 1;
        let (text, boundaries) = text::batch(options.seed, step, options.tokens);
        let batch = self.model.batch(&boundaries)?;
        let loss = self.model.loss(&text, &batch)?;
        let rate = 1e-3 * (step as f64 / 20.).min(1.);
        self.adam.step(&self.model.weights, &loss, step, rate)?;
        let loss = loss.to_scalar::<f32>()?;
        self.losses.push(loss);
        Ok(loss)
    }

    fn save(&self, file: &str) -> Result<()> {
        let mut all: HashMap<String, Tensor> = HashMap::new();
        for (name, weight) in &self.model.weights {
            all.insert(format!("weight.{name}"), weight.as_tensor().clone());
        }
        for (what, state) in [("first", &self.adam.first), ("second", &self.adam.second)] {
            all.extend(state.iter().map(|(name, x)| (format!("{what}.{name}"), x.clone())));
        }
        all.insert("losses".to_owned(), Tensor::new(self.losses.as_slice(), &Device::Cpu)?);
        // Write to a temporary file and rename it, so that a checkpoint is never incomplete.
        let part = format!("{file}.part");
        candle_core::safetensors::save(&all, &part)?;
        Ok(std::fs::rename(part, file)?)
    }

    fn load(&mut self, file: &str) -> Result<()> {
        let mut all = candle_core::safetensors::load(file, &Device::Cpu)?;
        let mut take = |name: String| match all.remove(&name) {
            Some(x) => Ok(x),
            None => Err(candle_core::Error::msg(format!("{file} has no {name}: it is of another model"))),
        };
        for (name, weight) in &self.model.weights {
            weight.set(&take(format!("weight.{name}"))?)?;
        }
        for (what, state) in [("first", &mut self.adam.first), ("second", &mut self.adam.second)] {
            for (name, x) in state {
                *x = take(format!("{what}.{name}"))?;
            }
        }
        self.losses = take("losses".to_owned())?.to_vec1()?;
        Ok(())
    }
}

fn train(options: &Options) -> Result<Run> {
    let mut run = Run::new(options)?;
    if let Some(file) = options.checkpoint.as_deref().filter(|file| std::path::Path::new(file).exists()) {
        run.load(file)?;
    }
    let shown = std::io::stderr().is_terminal();
    let bar = if shown { ProgressBar::new(options.steps) } else { ProgressBar::hidden() };
    let style = ProgressStyle::with_template("{msg} {wide_bar} {percent}% {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.set_position(run.losses.len() as u64);
    let (start, before) = (Instant::now(), run.losses.len());
    while (run.losses.len() as u64) < options.steps {
        let loss = run.step(options)?;
        bar.set_message(format!("loss {loss:.3}"));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let (steps, seconds) = (run.losses.len() - before, start.elapsed().as_secs_f64());
    if let (Some(first), Some(last)) = (run.losses.first(), run.losses.last()) {
        let rate = (steps * options.tokens) as f64 / seconds.max(1e-9);
        println!("{steps} steps in {seconds:.1} s, {rate:.0} tokens/s; loss {first:.4} at first, {last:.4} at last");
    }
    if let Some(file) = &options.checkpoint {
        run.save(file)?;
    }
    Ok(run)
}

fn main() -> std::process::ExitCode {
    let done = options(std::env::args().skip(1)).and_then(|options| {
        let run = train(&options)?;
        if let Some(file) = &options.losses {
            std::fs::write(file, run.losses.iter().map(|loss| format!("{loss}\n")).collect::<String>())?;
        }
        if let Some(file) = &options.curve {
            std::fs::write(file, curve::svg(&run.losses))?;
        }
        Ok(())
    });
    match done {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Options {
        let mut options = options(line.split_whitespace().map(str::to_owned)).unwrap();
        options.tokens = 96;
        options.config.layers = 2;
        options
    }

    #[test]
    fn both_attentions_lose_alike() {
        for line in ["--steps 4", "--steps 4 --position alibi", "--steps 4 --softcap 2"] {
            let (ours, plain) = (train(&of(line)).unwrap(), train(&of(&format!("{line} --attention plain"))).unwrap());
            for (a, b) in ours.losses.iter().zip(&plain.losses) {
                assert!((a - b).abs() < 1e-3, "{line}: {a} and {b}");
            }
            assert!(ours.losses[3] < ours.losses[0], "{line}: {:?}", ours.losses);
        }
    }

    #[test]
    fn a_checkpoint_goes_on_where_it_was() {
        let file = std::env::temp_dir().join(format!("sdpa-candle-gpt-{}.safetensors", std::process::id()));
        let line = format!("--checkpoint {}", file.display());
        train(&of(&format!("{line} --steps 3"))).unwrap();
        let resumed = train(&of(&format!("{line} --steps 5"))).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert_eq!(resumed.losses, train(&of("--steps 5")).unwrap().losses);
    }

    #[test]
    fn arguments_that_are_none_are_told() {
        for (line, part) in [("--steps 0", "--steps: got 0"), ("--attention other", "ours or plain"), ("--softcap -1", "above 0")] {
            let told = options(line.split_whitespace().map(str::to_owned)).unwrap_err().to_string();
            assert!(told.contains(part), "{told}");
        }
    }
}
