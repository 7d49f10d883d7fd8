//! Masks.

use crate::expr::{At, Axes, Axis, Bool, Expr, I32, Params, Trace};
use crate::mask::{Align, Mask, Rule, SEQ_LEN_KV, SEQ_LEN_Q};

/// Makes a mask of a library closure. A test runs each closure, so its declarations are valid.
fn of<F>(name: &str, f: F) -> Mask
where
    F: for<'t> FnOnce(At<'t>, Params<'t>) -> Expr<'t, Bool>,
{
    Mask::Traced(Rule::new(name, Trace::of_mask(f).unwrap_or_else(|e| unreachable!("{e}"))))
}

/// Parses `LEFT,RIGHT`, optionally followed by `:bottom-right` or `:ends`.
pub(super) fn read_window(text: &str) -> Result<Mask, &'static str> {
    let (sides, align) = match text.split_once(':') {
        None => (text, Align::TopLeft),
        Some((sides, "bottom-right")) => (sides, Align::BottomRight),
        Some((sides, "ends")) => (sides, Align::Ends),
        Some(_) => return Err("expected :bottom-right, :ends or nothing after LEFT,RIGHT"),
    };
    let side = |s: &str| match s {
        "inf" => Ok(None),
        n => n.parse().map(Some).map_err(|_| "expected an integer or inf for each side of the window"),
    };
    let (left, right) = sides.split_once(',').ok_or("window takes LEFT,RIGHT")?;
    Ok(Mask::window(side(left)?, side(right)?, align))
}

/// Attends to the last `window` keys up to the query.
///
/// ```
/// use sdpa_core::library;
/// assert_eq!(library::sliding_window(128).to_string().parse(), Ok(library::sliding_window(128)));
/// ```
pub fn sliding_window(window: i64) -> Mask {
    Mask::window(Some(window), Some(0), Align::TopLeft)
}

/// Attends to every `n`th key, counted from the query in both directions: keys for which `n` divides `q − k`.
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

/// Attends to keys of the query's document: keys whose number in the i32 tensor `doc_k` (batch, seq_kv) equals the query's number in
/// `doc_q` (batch, seq_q). Contiguous documents cost less as [`Packed`](crate::Packed) sequences.
///
/// ```
/// use sdpa_core::library;
/// assert_eq!(library::document().to_string().parse(), Ok(library::document()));
/// ```
pub fn document() -> Mask {
    of("document", |_, p| same_document(p))
}

/// Attends to the keys from `doc_start` up to, but not including, `doc_end`: two i32 tensors (batch, seq_q), read at the query. Equals
/// [`document`] for contiguous documents. cuDNN's backward engines read tensors along queries in place, but need tensors along keys
/// expanded to every pair. There, this mask is three times as fast as [`document`]. [`Packed`](crate::Packed) sequences are faster still.
pub fn document_runs() -> Mask {
    of("document-runs", |at, p| {
        let (start, end) = (p.tensor("doc_start", [Axis::Batch, Axis::Q], I32), p.tensor("doc_end", [Axis::Batch, Axis::Q], I32));
        at.k.ge(start) & at.k.lt(end)
    })
}

/// Attends to the first `len` keys from every query, and otherwise as [`document`].
///
/// ```
/// use sdpa_core::library;
/// assert_eq!(library::shared_prefix(40).to_string().parse(), Ok(library::shared_prefix(40)));
/// ```
pub fn shared_prefix(len: i32) -> Mask {
    of(&format!("shared-prefix:{len}"), |at, p| at.k.lt(len) | same_document(p))
}

/// Attends within the lengths of each batch entry, which are the i32 tensors `seq_len_q` and `seq_len_kv`, (batch). A length of 0 makes a
/// batch entry empty: its outputs are 0.
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

/// Attends to keys closer to the query than `window`, and to the first `globals` keys. The first `globals` queries attend to all keys.
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

/// Attends to the `size` keys around the query (neighbourhood attention in one dimension). At both ends of the keys the window is moved inwards, so
/// it has `size` keys if there are as many. `size` is odd.
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

/// Attends where the declared bool tensor `mask` is true. The tensor spans `axes`; all positions along any other axis share one element.
pub fn array_mask(axes: impl Into<Axes>) -> Mask {
    let axes = axes.into();
    let letters: String = axes.iter().filter_map(|a| a.name().chars().next()).collect();
    of(&format!("array:{letters}"), |_, p| p.tensor("mask", axes, Bool))
}

impl Mask {
    /// Attends to keys of the query's document: see [`document`].
    pub fn document() -> Mask {
        document()
    }

    /// Attends within the lengths of each batch entry: see [`padding`].
    pub fn padding() -> Mask {
        padding()
    }
}
