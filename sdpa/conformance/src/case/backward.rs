//! Options of a case for the backward pass.

use super::Case;
use sdpa::{BackwardSpec, DType, ExecutorName, Layout, Side, TensorSpec};
use serde::Deserialize;

/// Options of the backward pass of a case: its `backward` table. Without it, each gradient has the strides of its operand, and `d_o` has
/// those of `o`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Backward {
    /// Strides of the gradient of the output.
    pub d_o: Option<Place>,
    /// Strides of the gradient of the queries.
    pub dq: Option<Place>,
    /// Strides of the gradient of the keys.
    pub dk: Option<Place>,
    /// Strides of the gradient of the values.
    pub dv: Option<Place>,
    /// The parameters whose gradients are computed, each with the element type of its gradient: `"bias:f32"`.
    pub wrt: Vec<String>,
    /// Whether every run must return identical bits.
    pub deterministic: bool,
    /// Element type of `d_o`; by default that of `q`.
    pub d_o_dtype: Option<DType>,
    /// Element type of `dq`, `dk` and `dv`; by default that of the operands.
    pub gradient_dtype: Option<DType>,
    /// Whether all KV heads read the memory of one KV head. The gradient of each head has its own memory.
    pub repeated_heads: bool,
    /// The mean of the queries; the mean of the keys is its negative. Scores then have a mean of about `−scale·dim_qk·shift²`.
    pub shift: f64,
}

/// The memory layout of a tensor: order of axes, gaps, and axes with stride 0.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Place {
    /// Memory order of the axes; by default that of the case.
    #[serde(default)]
    pub layout: Option<Layout>,
    /// Gap in elements between rows.
    #[serde(default)]
    pub gap: i64,
    /// Axes with stride 0.
    #[serde(default)]
    pub repeats: Vec<usize>,
}

impl Place {
    fn of(&self, tensor: &mut TensorSpec, layout: Layout, tokens: Option<i64>) -> Result<(), String> {
        let [b, h, s, d] = tensor.dims;
        let (b, s) = tokens.map_or((b, s), |tokens| (1, tokens));
        let mut extents = [b, h, s, d + self.gap];
        for &axis in &self.repeats {
            *extents.get_mut(axis).ok_or_else(|| format!("axis {axis} is not one of 0 to 3"))? = 1;
        }
        tensor.strides = self.layout.unwrap_or(layout).strides(extents);
        self.repeats.iter().for_each(|&axis| tensor.strides[axis] = 0);
        Ok(())
    }
}

impl Case {
    /// Returns the specification of the backward pass.
    ///
    /// # Errors
    /// Fails if a mask or score_mod does not parse, if an axis does not exist, or if a parameter has no type.
    pub fn backward_spec(&self) -> Result<BackwardSpec, String> {
        let mut forward = self.spec()?;
        let options = self.backward.clone().unwrap_or_default();
        if options.repeated_heads {
            (forward.k.strides[1], forward.v.strides[1]) = (0, 0);
        }
        let mut spec = forward.backward();
        for wanted in &options.wrt {
            let dtype = |name: &str| DType::ALL.into_iter().find(|d| d.name() == name);
            let (name, dtype) = wanted
                .split_once(':')
                .and_then(|(name, ty)| Some((name, dtype(ty)?)))
                .ok_or_else(|| format!("{wanted:?} is no NAME:TYPE"))?;
            spec = spec.wrt(name, dtype);
        }
        spec.deterministic = options.deterministic;
        (spec.d_o_dtype, spec.gradient_dtype) = (options.d_o_dtype, options.gradient_dtype);
        let queries = [(&options.d_o, &mut spec.d_o, Side::Queries), (&options.dq, &mut spec.dq, Side::Queries)];
        let keys = [(&options.dk, &mut spec.dk, Side::Keys), (&options.dv, &mut spec.dv, Side::Keys)];
        for (place, tensor, side) in queries.into_iter().chain(keys) {
            if let Some(place) = place {
                place.of(tensor, self.layout, self.packed.as_ref().map(|packing| packing.tokens(side)))?;
            }
        }
        Ok(spec)
    }

    /// Returns a command line that computes the gradients of this case on an executor.
    pub fn backward_repro(&self, executor: ExecutorName) -> String {
        let options = self.backward.clone().unwrap_or_default();
        let types = [("d-o", options.d_o_dtype), ("gradient", options.gradient_dtype)];
        let types: String = types.into_iter().filter_map(|(name, dtype)| Some(format!(" --{name}-dtype {}", dtype?))).collect();
        self.repro(executor).replace(" --check", &format!(" --backward{types} --check"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cases(backward: &str) -> Result<Case, String> {
        let shape = "{ batch = 2, heads_q = 4, heads_kv = 2, seq_q = 3, seq_kv = 5, dim_qk = 8, dim_v = 8 }";
        let text = format!("[[case]]\nname = \"x\"\ndtype = \"f32\"\nshape = {shape}\nbackward = {backward}");
        Case::parse(&text).map(|mut cases| cases.remove(0))
    }

    #[test]
    fn places_are_read() {
        let spec = cases("{}").unwrap().backward_spec().unwrap();
        assert_eq!(spec, spec.forward.backward());
        let text = "{ d_o = { repeats = [0, 1, 2, 3] }, dq = { layout = \"sbhd\", gap = 2 }, repeated_heads = true, deterministic = true }";
        let spec = cases(text).unwrap().backward_spec().unwrap();
        assert_eq!((spec.d_o.strides, spec.dq.strides, spec.forward.k.strides), ([0; 4], [40, 10, 80, 1], [80, 0, 8, 1]));
        assert!(spec.deterministic && spec.dk.strides == [80, 40, 8, 1] && spec.validate().is_ok());
        let rows = cases("{ d_o = { repeats = [1, 2] } }").unwrap().backward_spec().unwrap();
        assert_eq!(rows.d_o.strides, [8, 0, 0, 1]);
    }

    #[test]
    fn what_is_not_known_is_an_error() {
        assert!(cases("{ d_q = {} }").is_err() && cases("{ dq = { gaps = 1 } }").is_err());
        assert!(cases("{ d_o = { repeats = [4] } }").unwrap().backward_spec().is_err());
        assert!(["bias", "bias:f31", ""].iter().all(|wrt| cases(&format!("{{ wrt = [\"{wrt}\"] }}")).unwrap().backward_spec().is_err()));
    }
}
