//! Parameters of kernels: one table defines the Rust structure, its bytes and its MSL source.

/// A type that has the same size and alignment in Rust and in MSL.
pub(crate) trait Field: Copy {
    /// Returns the MSL declaration of a member of this name.
    fn declaration(name: &str) -> String;
    /// Appends the bytes in the kernel's layout.
    fn write(self, bytes: &mut Vec<u8>);
}

macro_rules! scalar {
    ($($rust:ty => $msl:literal),*) => {$(
        impl Field for $rust {
            fn declaration(name: &str) -> String {
                format!("{} {name};", $msl)
            }
            fn write(self, bytes: &mut Vec<u8>) {
                bytes.extend(self.to_le_bytes());
            }
        }

        impl<const N: usize> Field for [$rust; N] {
            fn declaration(name: &str) -> String {
                format!("{} {name}[{N}];", $msl)
            }
            fn write(self, bytes: &mut Vec<u8>) {
                self.into_iter().for_each(|x| x.write(bytes));
            }
        }
    )*};
}
scalar!(i32 => "int", f32 => "float", i64 => "long");

macro_rules! params {
    ($(#[$top:meta])* $name:ident { $($(#[$doc:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$top])*
        #[derive(Clone, Copy, Debug, PartialEq)]
        #[repr(C)]
        pub(crate) struct $name { $($(#[$doc])* pub(crate) $field: $ty,)* }

        impl $name {
            /// The name of the struct in MSL.
            pub(crate) const NAME: &'static str = stringify!($name);

            /// Names and offsets of the members, in order.
            pub(crate) const OFFSETS: &'static [(&'static str, usize)] = &[$((stringify!($field), std::mem::offset_of!($name, $field)),)*];

            /// Returns the structure in MSL.
            pub(crate) fn msl() -> String {
                let mut text = format!("struct {} {{\n", stringify!($name));
                $(text.push_str(&format!("    {}\n", <$ty as Field>::declaration(stringify!($field))));)*
                text.push_str("};\n");
                text
            }

            /// Returns the structure as bytes in the kernel's layout; padding is 0.
            pub(crate) fn bytes(&self) -> Vec<u8> {
                let mut bytes = Vec::with_capacity(std::mem::size_of::<$name>());
                $(
                    bytes.resize(std::mem::offset_of!($name, $field), 0);
                    self.$field.write(&mut bytes);
                )*
                bytes.resize(std::mem::size_of::<$name>(), 0);
                bytes
            }
        }
    };
}

params! {
    /// Parameters of a forward kernel: strides, extents, bounds of the masks, and the scale.
    ForwardParams {
        /// Strides of `q` between neighbouring batch entries, heads and queries, in elements.
        q_strides: [i64; 3],
        /// Strides of `k` between neighbouring batch entries, heads and keys, in elements.
        k_strides: [i64; 3],
        /// Strides of `v` between neighbouring batch entries, heads and keys, in elements.
        v_strides: [i64; 3],
        /// Strides of `o` between neighbouring batch entries, heads and queries, in elements.
        o_strides: [i64; 3],
        /// Strides of row statistics between neighbouring batch entries, heads and queries, in elements.
        stats_strides: [i64; 3],
        /// Number of query tokens of the call, for packed sequences.
        tokens_q: i64,
        /// Number of key tokens of the call, for packed sequences.
        tokens_kv: i64,
        /// Number of query heads.
        heads_q: i32,
        /// Number of query heads per KV head.
        group: i32,
        /// Number of queries per head; for packed sequences, of the longest sequence.
        seq_q: i32,
        /// Number of keys per head; for packed sequences, of the longest sequence.
        seq_kv: i32,
        /// Keys at `k - q <= lower` are masked out.
        lower: i32,
        /// Keys at `k - q > upper` are masked out.
        upper: i32,
        /// Keys at `k > q` and `k >= prefix` are masked out.
        prefix: i32,
        /// Keys at `(k - q) - (keys - queries) <= ends_lower` are masked out, where `keys` and `queries` are the lengths of the batch entry.
        ends_lower: i32,
        /// Keys at `(k - q) - (keys - queries) > ends_upper` are masked out.
        ends_upper: i32,
        /// Factor of q·kᵀ.
        scale: f32,
    }
}

params! {
    /// Parameters of the kernels of a backward pass: strides, extents, bounds of the masks, and the scale.
    BackwardParams {
        /// Strides of `q` between neighbouring batch entries, heads and queries, in elements.
        q_strides: [i64; 3],
        /// Strides of `k` between neighbouring batch entries, heads and keys, in elements.
        k_strides: [i64; 3],
        /// Strides of `v` between neighbouring batch entries, heads and keys, in elements.
        v_strides: [i64; 3],
        /// Strides of `o` between neighbouring batch entries, heads and queries, in elements.
        o_strides: [i64; 3],
        /// Strides of `d_o` between neighbouring batch entries, heads, queries and elements.
        d_o_strides: [i64; 4],
        /// Strides of `dq` between neighbouring batch entries, heads and queries, in elements.
        dq_strides: [i64; 3],
        /// Strides of `dk` between neighbouring batch entries, heads and keys, in elements.
        dk_strides: [i64; 3],
        /// Strides of `dv` between neighbouring batch entries, heads and keys, in elements.
        dv_strides: [i64; 3],
        /// Strides of row statistics between neighbouring batch entries, heads and queries, in elements.
        stats_strides: [i64; 3],
        /// Number of query tokens of the call, for packed sequences.
        tokens_q: i64,
        /// Number of key tokens of the call, for packed sequences.
        tokens_kv: i64,
        /// Number of batch entries.
        batch: i32,
        /// Number of query heads.
        heads_q: i32,
        /// Number of query heads per KV head.
        group: i32,
        /// Number of queries per head; for packed sequences, of the longest sequence.
        seq_q: i32,
        /// Number of keys per head; for packed sequences, of the longest sequence.
        seq_kv: i32,
        /// Keys at `k - q <= lower` are masked out.
        lower: i32,
        /// Keys at `k - q > upper` are masked out.
        upper: i32,
        /// Keys at `k > q` and `k >= prefix` are masked out.
        prefix: i32,
        /// Keys at `(k - q) - (keys - queries) <= ends_lower` are masked out, where `keys` and `queries` are the lengths of the batch entry.
        ends_lower: i32,
        /// Keys at `(k - q) - (keys - queries) > ends_upper` are masked out.
        ends_upper: i32,
        /// Factor of q·kᵀ.
        scale: f32,
    }
}

params! {
    /// Parameters of the kernel that adds the partial sums of a parameter's gradient. Arrays are over (batch, head, query, key).
    SumParams {
        /// Number of elements of the gradient.
        elements: i64,
        /// Number of elements of the gradient along each axis.
        spanned: [i64; 4],
        /// Number of partial sums per element of the gradient, along each axis.
        summed: [i64; 4],
        /// Strides of partial sums along each axis, in elements.
        strides: [i64; 4],
    }
}

/// The parameters of one kernel in a call, in the structure that the kernel reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Params(pub(crate) Numbers);

/// The parameter structure of one kernel, by its kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Numbers {
    /// Parameters of a forward kernel.
    Forward(ForwardParams),
    /// Parameters of a backward kernel.
    Backward(BackwardParams),
    /// Parameters of the kernel that adds partial sums.
    Sum(SumParams),
}

impl Params {
    /// Returns the structure's name in MSL, its size in bytes, and the name and offset of each member.
    pub fn layout(&self) -> (&'static str, usize, &'static [(&'static str, usize)]) {
        match &self.0 {
            Numbers::Forward(_) => (ForwardParams::NAME, std::mem::size_of::<ForwardParams>(), ForwardParams::OFFSETS),
            Numbers::Backward(_) => (BackwardParams::NAME, std::mem::size_of::<BackwardParams>(), BackwardParams::OFFSETS),
            Numbers::Sum(_) => (SumParams::NAME, std::mem::size_of::<SumParams>(), SumParams::OFFSETS),
        }
    }

    /// Returns the structure as bytes, in the layout that the kernel reads.
    pub fn bytes(&self) -> Vec<u8> {
        match &self.0 {
            Numbers::Forward(params) => params.bytes(),
            Numbers::Backward(params) => params.bytes(),
            Numbers::Sum(params) => params.bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_lie_where_the_structure_has_them() {
        let params = ForwardParams {
            q_strides: [1, 2, 3],
            k_strides: [4, 5, 6],
            v_strides: [7, 8, 9],
            o_strides: [10, 11, -12],
            stats_strides: [22, 23, 24],
            tokens_q: 25,
            tokens_kv: 26,
            heads_q: 13,
            group: 14,
            seq_q: 15,
            seq_kv: 16,
            lower: -17,
            upper: 18,
            prefix: 19,
            ends_lower: -20,
            ends_upper: 21,
            scale: 0.5,
        };
        let bytes = params.bytes();
        assert_eq!(bytes.len(), std::mem::size_of::<ForwardParams>());
        let at = |name: &str| ForwardParams::OFFSETS.iter().find(|(field, _)| *field == name).unwrap().1;
        assert_eq!(bytes[at("o_strides") + 16..][..8], (-12i64).to_le_bytes());
        assert_eq!(bytes[at("lower")..][..4], (-17i32).to_le_bytes());
        assert_eq!(bytes[at("scale")..][..4], 0.5f32.to_le_bytes());
    }

    #[test]
    fn the_text_names_every_member_in_order() {
        let text = ForwardParams::msl();
        let places: Vec<usize> = ForwardParams::OFFSETS
            .iter()
            .map(|(field, _)| text.find(&format!(" {field};")).or(text.find(&format!(" {field}["))).unwrap())
            .collect();
        assert!(places.is_sorted(), "{text}");
        assert!(text.contains("    long q_strides[3];\n") && text.contains("    float scale;\n"), "{text}");
    }
}
