//! Masks.

use crate::expr::{At, Axes, Axis, Bool, Expr, I32, Params, Trace};
use crate::mask::{Align, Mask, Rule, SEQ_LEN_KV, SEQ_LEN_Q};

/// A closure of the library declares nothing against the rules, which a test of each sees.
fn of<F>(name: &str, f: F) -> Mask
where
    F: for<'t> FnOnce(At<'t>, Params<'t>) -> Expr<'t, Bool>,
{
    Mask::Traced(Rule::new(name, Trace::of_mask(f).unwrap_or_else(|e| unreachable!("{e}"))))
}

/// `LEFT,RIGHT`, with `:bottom-right`, `:ends` or nothing behind it.
pub(super) fn read_window(text: &str) -> Result<Mask, &'static str> {
    let (sides, align) = match text.split_once(':') {
        None => (text, Align::TopLeft),
        Some((sides, "bottom-right")) => (sides, Align::BottomRight),
        Some((sides, "ends")) => (sides, Align::Ends),
        Some(_) => return Err("a window has no suffix, or :bottom-right, or :ends"),
    };
    let side = |s: &str| match s {
        "inf" => Ok(None),
        n => n.parse().map(Some).map_err(|_| "each side of a window is a whole number or inf"),
    };
    let (left, right) = sides.split_once(',').ok_or("window takes LEFT,RIGHT")?;
    Ok(Mask::window(side(left)?, side(right)?, align))
}

/// Keeps the last `window` keys up to the query.
///
/// ```
/// use sdpa_core::library;
/// assert_eq!(library::sliding_window(128).to_string().parse(), Ok(library::sliding_window(128)));
/// ```
pub fn sliding_window(window: i64) -> Mask {
    Mask::window(Some(window), Some(0), Align::TopLeft)
}

/// Keeps every `n`th key, counted from the query in both directions: those where `n` divides `q − k`.
///
/// ```
/// use sdpa_core::library;
/// assert_eq!(library::dilated(3).to_string().parse(), Ok(library::dilated(3)));
/// ```
pub fn dilated(n: i32) -> Mask {
    of(&format!("dilated:{n}"), |at, _| ((at.q - at.k) % n).eq(0))
}

fn same_document<'t>(p: Params<'t>) -> Expr<'t, Bool> {
    p.tensor("doc_q", [Axis::Batch, Axis::Q], I32).eq(p.tensor("doc_k", [Axis::Batch, Axis::K], I32))
}

/// Keeps the keys of the query's document: where the i32 tensors `doc_q` (batch, seq_q) and `doc_k` (batch, seq_kv) are equal. Every tile is
/// computed; documents one behind the other cost what they hold as [`Packed`](crate::Packed) ones.
///
/// ```
/// use sdpa_core::library;
/// assert_eq!(library::document().to_string().parse(), Ok(library::document()));
/// ```
pub fn document() -> Mask {
    of("document", |_, p| same_document(p))
}

/// Keeps the keys from `doc_start` up to, and without, `doc_end` of the query, i32 tensors (batch, seq_q): [`document`] where
/// documents lie one after the other. cuDNN's backward engines read tensors along queries in place, and tensors along keys only
/// written out for every pair: this one is three times as fast there. [`Packed`](crate::Packed) documents are faster still.
pub fn document_runs() -> Mask {
    of("document-runs", |at, p| {
        let (start, end) = (p.tensor("doc_start", [Axis::Batch, Axis::Q], I32), p.tensor("doc_end", [Axis::Batch, Axis::Q], I32));
        at.k.ge(start) & at.k.lt(end)
    })
}

/// Keeps the first `len` keys for every query, and otherwise as [`document`].
///
/// ```
/// use sdpa_core::library;
/// assert_eq!(library::shared_prefix(40).to_string().parse(), Ok(library::shared_prefix(40)));
/// ```
pub fn shared_prefix(len: i32) -> Mask {
    of(&format!("shared-prefix:{len}"), |at, p| at.k.lt(len) | same_document(p))
}

/// Keeps queries and keys within the lengths of their batch entry: i32 tensors `seq_len_q` and `seq_len_kv`, (batch). A length of 0 is
/// a batch entry that is not there: its outputs are 0.
///
/// ```
/// use sdpa_core::library;
/// assert_eq!(library::padding().to_string().parse(), Ok(library::padding()));
/// ```
pub fn padding() -> Mask {
    of("padding", |at, p| {
        let rows = at.q.lt(p.tensor(SEQ_LEN_Q, [Axis::Batch], I32));
        rows & at.k.lt(p.tensor(SEQ_LEN_KV, [Axis::Batch], I32))
    })
}

/// Keeps keys nearer to the query than `window`, the first `globals` keys, and for the first `globals` queries all of them.
///
/// ```
/// use sdpa_core::library;
/// assert_eq!(library::global_local(64, 4).to_string().parse(), Ok(library::global_local(64, 4)));
/// ```
pub fn global_local(window: i32, globals: i32) -> Mask {
    of(&format!("global-local:{window},{globals}"), |at, _| {
        let near = (at.q - at.k).abs().lt(window);
        near | at.k.lt(globals) | at.q.lt(globals)
    })
}

/// Keeps the `size` keys around the query; at both ends of the keys the neighbourhood is moved inwards, so that it always has
/// `size` keys where there are as many (neighbourhood attention in one dimension). `size` is odd.
///
/// ```
/// use sdpa_core::library;
/// assert_eq!(library::natten(7).to_string().parse(), Ok(library::natten(7)));
/// ```
pub fn natten(size: i32) -> Mask {
    of(&format!("natten:{size}"), |at, _| {
        let first = (at.q - size / 2).min(at.seq_kv - size).max(0);
        at.k.ge(first) & at.k.lt(first + size)
    })
}

/// Keeps what the declared bool tensor `mask` says, true = attend. It spans these axes and is one value for all along the others.
pub fn array_mask(axes: impl Into<Axes>) -> Mask {
    let axes = axes.into();
    let letters: String = axes.iter().filter_map(|a| a.name().chars().next()).collect();
    of(&format!("array:{letters}"), |_, p| p.tensor("mask", axes, Bool))
}

impl Mask {
    /// Keeps the keys of the query's document: see [`document`].
    pub fn document() -> Mask {
        document()
    }

    /// Keeps what lies within the lengths of a batch entry: see [`padding`].
    pub fn padding() -> Mask {
        padding()
    }
}
