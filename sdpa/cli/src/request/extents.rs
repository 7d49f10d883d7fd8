//! Extents of operands, some of which other mistakes may leave unknown.

use sdpa::{AttentionSpec, DType, Layout, Shape, SpecError, TensorSpec};

/// Returns the extents of q, k and v.
pub(super) fn extents(s: Shape) -> [[i64; 4]; 3] {
    [[s.batch, s.heads_q, s.seq_q, s.dim_qk], [s.batch, s.heads_kv, s.seq_kv, s.dim_qk], [s.batch, s.heads_kv, s.seq_kv, s.dim_v]]
}

/// Returns the specification, with unknown extents chosen so that they cause no errors. Returns `None` if all are unknown.
pub(super) fn specification(dims: [Option<[i64; 4]>; 3], dtype: DType, layout: Layout, stats: bool) -> Option<AttentionSpec> {
    let [q, k, v] = dims;
    let any = q.or(k).or(v)?;
    let v_or = |fallback: [i64; 4]| v.unwrap_or(fallback);
    let dim_qk = q.or(k).map_or(1, |t| t[3]);
    let k = k.unwrap_or_else(|| {
        let like = v_or([any[0], any[1], 1, 1]);
        [like[0], like[1], like[2], dim_qk]
    });
    let q = q.unwrap_or([k[0], k[1], 1, dim_qk]);
    let v = v.unwrap_or(k);
    let o = [q[0], q[1], q[2], v[3]];
    let [q, k, v, o] = [q, k, v, o].map(|dims| TensorSpec::dense(dims, layout));
    let mut spec = AttentionSpec::strided(dtype, [q, k, v], o);
    spec.stats = stats;
    Some(spec)
}

/// Removes errors about tensors with unknown extents, and errors about `o` that only repeat others.
pub(super) fn relevant(errors: Vec<SpecError>, dims: [Option<[i64; 4]>; 3]) -> Vec<SpecError> {
    let about = |error: &SpecError, name: &str| error.field.starts_with(&format!("{name}."));
    // Score_mods and masks are validated separately.
    let rules = |error: &SpecError| error.field.starts_with("score_mods") || error.field.starts_with("masks");
    let given = |error: &SpecError| {
        !rules(error) && !["q", "k", "v"].into_iter().zip(dims).any(|(name, dims)| dims.is_none() && about(error, name))
    };
    let (of_o, others): (Vec<_>, Vec<_>) = errors.into_iter().filter(given).partition(|error| about(error, "o"));
    if others.is_empty() && dims.iter().all(Option::is_some) { of_o } else { others }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(dims: [Option<[i64; 4]>; 3]) -> Vec<String> {
        let spec = specification(dims, DType::F32, Layout::Bhsd, false).unwrap();
        let errors = spec.validate().err().map_or(Vec::new(), |e| e.0);
        relevant(errors, dims).into_iter().map(|e| e.field).collect()
    }

    #[test]
    fn what_is_missing_hides_no_mistake_and_makes_none() {
        let (q, k, v) = ([2, 4, 9, 8], [2, 2, 11, 8], [2, 2, 11, 16]);
        for missing in 0..8u8 {
            let dims = [(q, 1), (k, 2), (v, 4)].map(|(t, bit)| (missing & bit == 0).then_some(t));
            if missing < 7 {
                assert_eq!(fields(dims), Vec::<String>::new(), "{missing}");
            }
        }
        assert_eq!(fields([Some([3, 4, 9, 8]), None, Some(v)]), ["v.dims[0] (batch)"]);
        assert_eq!(fields([None, Some(k), Some([2, 3, 11, 16])]), ["v.dims[1] (heads_kv)"]);
        assert_eq!(fields([Some([2, 3, 9, 8]), Some(k), None]), ["q.dims[1] (heads_q)"]);
        assert_eq!(fields([Some([2, 4, -1, 8]), Some(k), Some(v)]), ["q.dims[2] (seq)"]);
    }
}
