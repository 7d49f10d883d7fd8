//! Gradients against central differences of the loss, packed sequences against each alone, generation with a cache against one without;
//! with the feature `originals`, all of it against candle-transformers.

use crate::config::{Config, Family};
use crate::decoder::Decoder;
use crate::{task, text, weights};
use candle_core::{DType, Device, Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};

fn model(config: &Config, variables: &VarMap) -> Decoder {
    Decoder::load(config, &VarBuilder::from_varmap(variables, DType::F32, &Device::Cpu)).unwrap()
}

fn number(x: &Tensor) -> f64 {
    x.to_dtype(DType::F64).unwrap().to_scalar().unwrap()
}

/// Checks that every variable has a gradient, whose length is the derivative of `loss` along it.
fn check(what: &str, variables: &[(String, Var)], of: &Tensor, loss: &mut dyn FnMut() -> Result<Tensor>) {
    let gradients = of.backward().unwrap();
    let (count, without) = task::trained(variables, &gradients).unwrap();
    assert_eq!((count, without), (variables.len(), vec![]), "{what}");
    for (name, variable) in variables {
        let gradient = gradients.get(variable).unwrap();
        let length = number(&gradient.sqr().unwrap().sum_all().unwrap()).sqrt();
        let direction = (gradient / length).unwrap();
        let at = variable.as_tensor().copy().unwrap();
        let mut along = |step: f64| {
            variable.set(&(&at + (&direction * step).unwrap()).unwrap()).unwrap();
            number(&loss().unwrap())
        };
        // Fourth order: the loss in f32 is too coarse for short steps. Along a large gradient it is curved.
        let step = 0.04 / (1. + length);
        let difference = (8. * (along(step) - along(-step)) - (along(2. * step) - along(-2. * step))) / (12. * step);
        variable.set(&at).unwrap();
        assert!((difference - length).abs() <= 0.02 * length + 1e-5, "{what} {name}: {length}, differences say {difference}");
    }
}

#[test]
fn every_variable_has_the_gradient_of_the_loss() {
    for family in Family::ALL {
        let config = Config::small(family);
        let variables = weights::random(&config, 1, &Device::Cpu).unwrap();
        let model = model(&config, &variables);
        let sequences = [text(&config, 2, 24), text(&config, 3, 11)];
        let sequences: Vec<&[u32]> = sequences.iter().map(Vec::as_slice).collect();
        let mut loss = || task::loss(&model, &sequences);
        let packed = loss().unwrap();
        check(family.name(), &weights::named(&variables), &packed, &mut loss);
        // The loss of packed sequences is the mean over the tokens of both.
        let alone = [0, 1].map(|n| number(&task::loss(&model, &sequences[n..=n]).unwrap()) * (sequences[n].len() - 1) as f64);
        let mean = alone.iter().sum::<f64>() / 33.;
        assert!((number(&packed) - mean).abs() < 1e-5, "{}: {} {mean}", family.name(), number(&packed));
    }
}

#[test]
fn a_cache_does_not_change_what_is_generated() {
    for family in Family::ALL {
        let config = Config::small(family);
        let model = model(&config, &weights::random(&config, 24, &Device::Cpu).unwrap());
        let prompt = text(&config, 5, 6);
        let tokens = task::generate(&model, &prompt, 20).unwrap();
        let mut all = prompt.clone();
        for token in &tokens {
            let x = task::packed(&model, &[&all]).unwrap();
            assert_eq!(task::greedy(&model, &x).unwrap(), *token, "{}", family.name());
            all.push(*token);
        }
        let different: std::collections::BTreeSet<_> = tokens.iter().collect();
        assert!(different.len() > 3, "{}: {tokens:?} shows little", family.name());
    }
}

#[cfg(feature = "originals")]
mod originals {
    use super::*;
    use crate::originals::Original;

    /// Relative to the largest logit.
    const TOLERANCE: f64 = 1e-5;

    /// Returns the logits (1, vocabulary) after a sequence.
    fn logits(model: &Decoder, tokens: &[u32]) -> Tensor {
        model.logits(&task::packed(model, &[tokens]).unwrap().narrow(0, tokens.len() - 1, 1).unwrap()).unwrap()
    }

    /// In a prefill of candle's Gemma 3, a query attends to one key more than `sliding_window`; in decoding it does not.
    fn of_prefill(config: &Config) -> Config {
        Config { window: config.window + 1, ..config.clone() }
    }

    #[test]
    fn logits_agree() {
        for family in Family::ALL {
            let config = Config::small(family);
            let variables = weights::random(&config, 6, &Device::Cpu).unwrap();
            let (ours, mut theirs) = (model(&of_prefill(&config), &variables), Original::load(&config, &variables).unwrap());
            let tokens = text(&config, 7, 30);
            for length in [1, 2, 8, 9, 10, 17, 30] {
                let want = theirs.logits(&tokens[..length]).unwrap();
                let difference = number(&(logits(&ours, &tokens[..length]) - &want).unwrap().abs().unwrap().max_all().unwrap());
                let largest = number(&want.abs().unwrap().max_all().unwrap());
                println!("{} {length}: {difference:.1e} of {largest:.1}", family.name());
                assert!(difference <= TOLERANCE * largest, "{} {length}: {difference} of {largest}", family.name());
            }
        }
    }

    #[test]
    fn greedy_generation_is_equal() {
        for family in Family::ALL {
            let config = Config::small(family);
            let variables = weights::random(&config, 8, &Device::Cpu).unwrap();
            let (ours, mut theirs) = (model(&config, &variables), Original::load(&config, &variables).unwrap());
            // The prompt fits into the window, so that both mean the same window.
            let prompt = text(&config, 9, config.window);
            let tokens = task::generate(&ours, &prompt, 24).unwrap();
            assert_eq!(tokens, theirs.generate(&prompt, 24).unwrap(), "{}", family.name());
            let different: std::collections::BTreeSet<_> = tokens.iter().collect();
            assert!(different.len() > 3, "{}: {tokens:?} shows little", family.name());
        }
    }

    #[test]
    fn gradients_are_those_of_the_original_loss() {
        // candle's own op of the last norm is fused in Llama and Qwen 3, so only the matrix of the logits trains.
        for (family, count) in [(Family::Llama, 1), (Family::Gemma3, 34), (Family::Qwen3, 1)] {
            let config = Config::small(family);
            let variables = weights::random(&config, 10, &Device::Cpu).unwrap();
            let (ours, mut theirs) = (model(&of_prefill(&config), &variables), Original::load(&config, &variables).unwrap());
            let (tokens, named) = (text(&config, 11, 21), weights::named(&variables));
            let (trained, without) = task::trained(&named, &theirs.loss(&tokens).unwrap().backward().unwrap()).unwrap();
            println!("{}: {trained} of {} variables have a gradient in the original", family.name(), named.len());
            assert_eq!(trained, count, "{}: {without:?}", family.name());
            let target = Tensor::new(&tokens[20..], &Device::Cpu).unwrap();
            let loss = candle_nn::loss::cross_entropy(&logits(&ours, &tokens[..20]), &target).unwrap();
            check(family.name(), &named, &loss, &mut || theirs.loss(&tokens));
        }
    }
}
