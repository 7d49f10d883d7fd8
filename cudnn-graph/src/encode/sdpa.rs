//! The unified attention ops: their own attributes, an inner operation graph, an inner softmax.

use super::Encoder;
use crate::ffi::codes::{Attribute, AttributeType, Kind};
use crate::ir::op::{ScoreGraph, SdpaBackward, SdpaForward};
use crate::ir::shape::attention_shape;
use crate::ir::ty::{DType, Dims};
use crate::ir::{Tensor, TensorId};
use crate::program::{DescriptorId, Values};

impl Encoder<'_> {
    /// Encodes the score ops as a finalized operation graph over tensors of the outer graph.
    fn score(&mut self, score: Option<&ScoreGraph>) -> Option<(DescriptorId, i64, i64)> {
        let score = score?;
        let ops = self.ops(&score.ops);
        let inner = self.push(Kind::OPERATIONGRAPH, "score", |d| d.descriptors(Attribute::OPERATIONGRAPH_OPS, &ops));
        Some((inner, score.input.uid(), score.output.uid()))
    }

    /// Encodes a softmax over placeholder scores. It carries outputs for which the unified op has no attribute.
    fn inner_softmax(&mut self, s: &SdpaForward) -> Option<DescriptorId> {
        if s.stats.is_none() && s.max.is_none() && s.sum_exp.is_none() && s.sink.is_none() {
            return None;
        }
        // Take the extents from `attention_shape`: with a paged cache, `k` is a page pool whose third extent is the page size.
        let scores = attention_shape(self.graph, s).map_or(Dims(Vec::new()), |shape| Dims::from(shape.scores()));
        let mut stand_in = |name: &str| {
            let uid = self.next_uid;
            self.next_uid += 1;
            self.tensor_as(&Tensor::virtual_(name, DType::F32, scores.clone()), uid, None)
        };
        let (x, y) = (stand_in("softmax_x"), stand_in("softmax_y"));
        Some(self.softmax_over(x, y, [s.stats, s.max, s.sum_exp, s.sink], false))
    }

    pub(super) fn sdpa_forward(&mut self, s: &SdpaForward) -> DescriptorId {
        use Attribute as A;
        // Stats without other statistics or a sink have an attribute of their own, the only one that runtimes before 9.21 support.
        let plain_stats =
            self.runtime < A::OPERATION_SDPA_FWD_SOFTMAX_DESC.since() && s.max.is_none() && s.sum_exp.is_none() && s.sink.is_none();
        let softmax = if plain_stats { None } else { self.inner_softmax(s) };
        let stats = if plain_stats { s.stats } else { None };
        let score = self.score(s.score.as_ref());
        let mut rows: Vec<(Attribute, TensorId)> = [
            (A::OPERATION_SDPA_FWD_QDESC, Some(s.q)),
            (A::OPERATION_SDPA_FWD_KDESC, Some(s.k)),
            (A::OPERATION_SDPA_FWD_VDESC, Some(s.v)),
            (A::OPERATION_SDPA_FWD_ODESC, Some(s.o)),
            (A::OPERATION_SDPA_FWD_STATSDESC, stats),
            (A::OPERATION_SDPA_FWD_SCALEDESC, s.attn_scale),
            (A::OPERATION_SDPA_FWD_BLOCK_MASK_DESC, s.block_mask),
            (A::OPERATION_SDPA_FWD_PAGE_TABLE_KDESC, s.page_table_k),
            (A::OPERATION_SDPA_FWD_PAGE_TABLE_VDESC, s.page_table_v),
            (A::OPERATION_SDPA_FWD_SEQ_LEN_QDESC, s.seq_len_q),
            (A::OPERATION_SDPA_FWD_SEQ_LEN_KVDESC, s.seq_len_kv),
            (A::OPERATION_SDPA_FWD_CU_SEQ_LEN_QDESC, s.cu_seq_len_q),
            (A::OPERATION_SDPA_FWD_CU_SEQ_LEN_KVDESC, s.cu_seq_len_kv),
        ]
        .into_iter()
        .filter_map(|(a, id)| id.map(|id| (a, id)))
        .collect();
        if let Some(d) = &s.dropout {
            rows.push((A::OPERATION_SDPA_FWD_DROPOUT_SEED_DESC, d.seed));
            rows.push((A::OPERATION_SDPA_FWD_DROPOUT_OFFSET_DESC, d.offset));
            rows.extend(d.rng_dump.map(|dump| (A::OPERATION_SDPA_FWD_DROPOUT_RNG_DUMP_DESC, dump)));
        }
        if let Some(f) = &s.fp8 {
            rows.extend([
                (A::OPERATION_SDPA_FWD_DESCALE_QDESC, f.descale_q),
                (A::OPERATION_SDPA_FWD_DESCALE_KDESC, f.descale_k),
                (A::OPERATION_SDPA_FWD_DESCALE_VDESC, f.descale_v),
                (A::OPERATION_SDPA_FWD_DESCALE_SDESC, f.descale_s),
                (A::OPERATION_SDPA_FWD_SCALE_SDESC, f.scale_s),
                (A::OPERATION_SDPA_FWD_SCALE_ODESC, f.scale_o),
                (A::OPERATION_SDPA_FWD_AMAX_SDESC, f.amax_s),
                (A::OPERATION_SDPA_FWD_AMAX_ODESC, f.amax_o),
            ]);
        }
        let rows: Vec<(Attribute, DescriptorId)> = rows.into_iter().map(|(a, id)| (a, self.tensor(id))).collect();
        self.push(Kind::OPERATION_SDPA_FWD, "sdpa_forward", |d| {
            for (attribute, tensor) in rows {
                d.descriptor(attribute, tensor);
            }
            if let Some((inner, input, output)) = score {
                d.descriptor(A::OPERATION_SDPA_FWD_SUBGRAPH, inner);
                d.i64(A::OPERATION_SDPA_FWD_SUBGRAPH_INPUT_UID, &[input]);
                d.i64(A::OPERATION_SDPA_FWD_SUBGRAPH_OUTPUT_UID, &[output]);
            }
            d.descriptor(A::OPERATION_SDPA_FWD_SOFTMAX_DESC, softmax);
            if let Some(dropout) = &s.dropout {
                d.f32(A::OPERATION_SDPA_FWD_DROPOUT_PROBABILITY, dropout.probability);
            }
        })
    }

    pub(super) fn sdpa_backward(&mut self, s: &SdpaBackward) -> DescriptorId {
        use Attribute as A;
        let score = self.score(s.score.as_ref());
        let rows: Vec<(Attribute, DescriptorId)> = [
            (A::OPERATION_SDPA_BWD_QDESC, Some(s.q)),
            (A::OPERATION_SDPA_BWD_KDESC, Some(s.k)),
            (A::OPERATION_SDPA_BWD_VDESC, Some(s.v)),
            (A::OPERATION_SDPA_BWD_ODESC, Some(s.o)),
            (A::OPERATION_SDPA_BWD_STATSDESC, Some(s.stats)),
            (A::OPERATION_SDPA_BWD_SCALEDESC, s.attn_scale),
            (A::OPERATION_SDPA_BWD_SEQ_LEN_QDESC, s.seq_len_q),
            (A::OPERATION_SDPA_BWD_SEQ_LEN_KVDESC, s.seq_len_kv),
            (A::OPERATION_SDPA_BWD_DQDESC, Some(s.dq)),
            (A::OPERATION_SDPA_BWD_DKDESC, Some(s.dk)),
            (A::OPERATION_SDPA_BWD_DVDESC, Some(s.dv)),
            (A::OPERATION_SDPA_BWD_DODDESC, Some(s.d_o)),
        ]
        .into_iter()
        .filter_map(|(a, id)| id.map(|id| (a, self.tensor(id))))
        .collect();
        self.push(Kind::OPERATION_SDPA_BWD, "sdpa_backward", |d| {
            for (attribute, tensor) in rows {
                d.descriptor(attribute, tensor);
            }
            if let Some((inner, input, output)) = score {
                d.descriptor(A::OPERATION_SDPA_BWD_SUBGRAPH, inner);
                d.set(A::OPERATION_SDPA_BWD_SUBGRAPH_INPUT_UID, AttributeType::INT64, Values::I64(vec![input]));
                d.set(A::OPERATION_SDPA_BWD_SUBGRAPH_OUTPUT_UID, AttributeType::INT64, Values::I64(vec![output]));
            }
        })
    }
}
