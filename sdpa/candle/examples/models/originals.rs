//! candle-transformers' own models, on the same variables.

use crate::config::{Config, Family};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Activation, VarBuilder, VarMap};
use candle_transformers::models::{gemma3, llama, qwen3};

enum Model {
    Llama(llama::Llama, Box<llama::Config>, Box<llama::Cache>),
    Gemma3(gemma3::Model),
    Qwen3(qwen3::ModelForCausalLM),
}

/// A model with its KV cache, for one sequence.
pub(crate) struct Original(Model);

fn llama_config(config: &Config) -> llama::Config {
    llama::Config {
        hidden_size: config.hidden,
        intermediate_size: config.intermediate,
        vocab_size: config.vocabulary,
        num_hidden_layers: config.layers,
        num_attention_heads: config.heads,
        num_key_value_heads: config.heads_kv,
        use_flash_attn: false,
        rms_norm_eps: config.eps.into(),
        rope_theta: config.theta as f32,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: config.positions,
        tie_word_embeddings: false,
    }
}

fn gemma3_config(config: &Config) -> gemma3::Config {
    gemma3::Config {
        attention_bias: false,
        head_dim: config.dim,
        hidden_activation: Activation::GeluPytorchTanh,
        hidden_size: config.hidden,
        intermediate_size: config.intermediate,
        num_attention_heads: config.heads,
        num_hidden_layers: config.layers,
        num_key_value_heads: config.heads_kv,
        rms_norm_eps: config.eps.into(),
        rope_theta: config.theta,
        rope_local_base_freq: config.local_theta,
        vocab_size: config.vocabulary,
        final_logit_softcapping: Some(config.softcaps[1].into()),
        attn_logit_softcapping: Some(config.softcaps[0].into()),
        query_pre_attn_scalar: config.dim,
        sliding_window: config.window,
        sliding_window_pattern: config.pattern,
        max_position_embeddings: config.positions,
    }
}

fn qwen3_config(config: &Config) -> qwen3::Config {
    qwen3::Config {
        vocab_size: config.vocabulary,
        hidden_size: config.hidden,
        intermediate_size: config.intermediate,
        num_hidden_layers: config.layers,
        num_attention_heads: config.heads,
        head_dim: config.dim,
        attention_bias: false,
        num_key_value_heads: config.heads_kv,
        max_position_embeddings: config.positions,
        sliding_window: None,
        max_window_layers: 0,
        tie_word_embeddings: false,
        rope_theta: config.theta,
        rms_norm_eps: config.eps.into(),
        use_sliding_window: false,
        hidden_act: Activation::Silu,
    }
}

impl Original {
    pub(crate) fn load(config: &Config, variables: &VarMap) -> Result<Original> {
        let device = &Device::Cpu;
        let vb = VarBuilder::from_varmap(variables, DType::F32, device);
        Ok(Original(match config.family {
            Family::Llama => {
                let config = llama_config(config);
                let cache = llama::Cache::new(true, DType::F32, &config, device)?;
                Model::Llama(llama::Llama::load(vb, &config)?, Box::new(config), Box::new(cache))
            }
            Family::Gemma3 => Model::Gemma3(gemma3::Model::new(false, &gemma3_config(config), vb)?),
            Family::Qwen3 => Model::Qwen3(qwen3::ModelForCausalLM::new(&qwen3_config(config), vb)?),
        }))
    }

    fn clear(&mut self) -> Result<()> {
        match &mut self.0 {
            Model::Llama(_, config, cache) => **cache = llama::Cache::new(true, DType::F32, config, &Device::Cpu)?,
            Model::Gemma3(model) => model.clear_kv_cache(),
            Model::Qwen3(model) => model.clear_kv_cache(),
        }
        Ok(())
    }

    /// Returns the logits (1, vocabulary) after the last of these tokens, which come after `done` others.
    fn forward(&mut self, tokens: &[u32], done: usize) -> Result<Tensor> {
        let ids = Tensor::new(tokens, &Device::Cpu)?.unsqueeze(0)?;
        match &mut self.0 {
            Model::Llama(model, _, cache) => model.forward(&ids, done, cache),
            Model::Gemma3(model) => model.forward(&ids, done)?.squeeze(1),
            Model::Qwen3(model) => model.forward(&ids, done)?.squeeze(1),
        }
    }

    /// Returns the logits (1, vocabulary) after a sequence.
    pub(crate) fn logits(&mut self, tokens: &[u32]) -> Result<Tensor> {
        self.clear()?;
        self.forward(tokens, 0)
    }

    /// Returns the cross entropy of the last token after the others.
    pub(crate) fn loss(&mut self, tokens: &[u32]) -> Result<Tensor> {
        let (inputs, target) = tokens.split_at(tokens.len() - 1);
        candle_nn::loss::cross_entropy(&self.logits(inputs)?, &Tensor::new(target, &Device::Cpu)?)
    }

    /// Continues a prompt by the most probable tokens.
    #[cfg(test)]
    pub(crate) fn generate(&mut self, prompt: &[u32], tokens: usize) -> Result<Vec<u32>> {
        self.clear()?;
        let (mut text, mut done) = (prompt.to_vec(), 0);
        while text.len() < prompt.len() + tokens {
            let logits = self.forward(&text[done..].to_vec(), done)?;
            done = text.len();
            text.extend(logits.argmax(candle_core::D::Minus1)?.to_vec1::<u32>()?);
        }
        Ok(text.split_off(prompt.len()))
    }
}
