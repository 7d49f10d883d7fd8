//! The axes of norms, for construction, verification and interpretation.

use super::op::NormMode;

/// Returns the extents of the statistics of a norm over `x`: those of `x`, with 1 along the normalized axes. The error names what is wrong
/// with the extents of the scale.
pub(crate) fn statistics(mode: NormMode, x: &[i64], scale: &[i64]) -> Result<Vec<i64>, String> {
    if x.len() < 2 || scale.len() != x.len() {
        return Err(format!("x has {} axes and the scale {}, expected equal numbers of at least 2", x.len(), scale.len()));
    }
    let per_channel: Vec<i64> = x.iter().enumerate().map(|(axis, &n)| if axis == 1 { n } else { 1 }).collect();
    match mode {
        NormMode::Batch | NormMode::Instance => {
            if scale != per_channel {
                return Err(format!("the scale has extents {scale:?}, expected one per channel, {per_channel:?}"));
            }
            let kept = if mode == NormMode::Batch { 0 } else { x[0] };
            Ok(per_channel.iter().enumerate().map(|(axis, &n)| if axis == 0 { kept.max(1) } else { n }).collect())
        }
        NormMode::Layer | NormMode::Rms | NormMode::AdaLayer => {
            let first = if mode == NormMode::AdaLayer { x[0] } else { 1 };
            if scale[0] != first {
                return Err(format!("axis 0 of the scale is {}, expected {first}", scale[0]));
            }
            for (axis, (&n, &s)) in x.iter().zip(scale).enumerate().skip(1) {
                if s != 1 && s != n {
                    return Err(format!("axis {axis} of the scale is {s}, expected 1, or {n} as in x"));
                }
            }
            if scale[1..].iter().all(|&s| s == 1) && x[1..].iter().any(|&n| n != 1) {
                return Err("the scale has extent 1 along every axis after the first, so no axis is normalized".to_owned());
            }
            let kept = x.iter().zip(scale).enumerate().map(|(axis, (&n, &s))| if axis > 0 && s == n { 1 } else { n });
            Ok(kept.collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_normalized_axes_have_extent_1() {
        let x = [2, 3, 4, 5];
        assert_eq!(statistics(NormMode::Batch, &x, &[1, 3, 1, 1]), Ok(vec![1, 3, 1, 1]));
        assert_eq!(statistics(NormMode::Instance, &x, &[1, 3, 1, 1]), Ok(vec![2, 3, 1, 1]));
        assert_eq!(statistics(NormMode::Layer, &x, &[1, 3, 4, 5]), Ok(vec![2, 1, 1, 1]));
        assert_eq!(statistics(NormMode::Rms, &x, &[1, 1, 1, 5]), Ok(vec![2, 3, 4, 1]));
        assert_eq!(statistics(NormMode::AdaLayer, &x, &[2, 1, 1, 5]), Ok(vec![2, 3, 4, 1]));
    }
}
