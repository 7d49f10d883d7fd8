//! Parameters of kernels: one table gives the Rust structure, its bytes and its MSL text.

/// A type that has the same size and alignment in Rust and in MSL.
pub(crate) trait Field: Copy {
    /// The declaration of a member of this name.
    fn declaration(name: &str) -> String;
    /// Appends the bytes as a kernel reads them.
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

            /// Names of the members and where they begin, in order.
            pub(crate) const OFFSETS: &'static [(&'static str, usize)] = &[$((stringify!($field), std::mem::offset_of!($name, $field)),)*];

            /// The structure in MSL.
            pub(crate) fn msl() -> String {
                let mut text = format!("struct {} {{\n", stringify!($name));
                $(text.push_str(&format!("    {}\n", <$ty as Field>::declaration(stringify!($field))));)*
                text.push_str("};\n");
                text
            }

            /// The structure as a kernel reads it; what pads it is 0.
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
    /// What a forward kernel is told of a call.
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
        /// Tokens of queries in the call, where batch entries are packed documents.
        tokens_q: i64,
        /// Tokens of keys in the call, where batch entries are packed documents.
        tokens_kv: i64,
        /// Query heads.
        heads_q: i32,
        /// Query heads that share a key head.
        group: i32,
        /// Queries.
        seq_q: i32,
        /// Keys.
        seq_kv: i32,
        /// Keys at `k - q <= lower` are dropped.
        lower: i32,
        /// Keys at `k - q > upper` are dropped.
        upper: i32,
        /// Keys at `k > q` and `k >= prefix` are dropped.
        prefix: i32,
        /// Keys at `(k - q) - (keys - queries) <= ends_lower` are dropped, where `keys` and `queries` are how many a batch entry has.
        ends_lower: i32,
        /// Keys at `(k - q) - (keys - queries) > ends_upper` are dropped.
        ends_upper: i32,
        /// Multiplies a product of a query and a key.
        scale: f32,
    }
}

params! {
    /// What the kernels of a backward pass are told of a call.
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
        /// Tokens of queries in the call, where batch entries are packed documents.
        tokens_q: i64,
        /// Tokens of keys in the call, where batch entries are packed documents.
        tokens_kv: i64,
        /// Batch entries.
        batch: i32,
        /// Query heads.
        heads_q: i32,
        /// Query heads that share a key head.
        group: i32,
        /// Queries.
        seq_q: i32,
        /// Keys.
        seq_kv: i32,
        /// Keys at `k - q <= lower` are dropped.
        lower: i32,
        /// Keys at `k - q > upper` are dropped.
        upper: i32,
        /// Keys at `k > q` and `k >= prefix` are dropped.
        prefix: i32,
        /// Keys at `(k - q) - (keys - queries) <= ends_lower` are dropped, where `keys` and `queries` are how many a batch entry has.
        ends_lower: i32,
        /// Keys at `(k - q) - (keys - queries) > ends_upper` are dropped.
        ends_upper: i32,
        /// Multiplies a product of a query and a key.
        scale: f32,
    }
}

params! {
    /// What the kernel that adds up parts of sums is told: arrays are over (batch, head, query, key).
    SumParams {
        /// Elements of the result.
        elements: i64,
        /// Extents of the result along each axis.
        spanned: [i64; 4],
        /// Parts of each of its elements along each axis.
        summed: [i64; 4],
        /// Strides between neighbouring parts along each axis, in elements.
        strides: [i64; 4],
    }
}

/// The numbers that one kernel receives in a call, as the structure that it reads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Params(pub(crate) Numbers);

/// The structure of one kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Numbers {
    /// Of a forward kernel.
    Forward(ForwardParams),
    /// Of a kernel of a backward pass.
    Backward(BackwardParams),
    /// Of the kernel that adds up parts.
    Sum(SumParams),
}

impl Params {
    /// The name of the structure in MSL, its size, and where its members begin.
    pub fn layout(&self) -> (&'static str, usize, &'static [(&'static str, usize)]) {
        match &self.0 {
            Numbers::Forward(_) => (ForwardParams::NAME, std::mem::size_of::<ForwardParams>(), ForwardParams::OFFSETS),
            Numbers::Backward(_) => (BackwardParams::NAME, std::mem::size_of::<BackwardParams>(), BackwardParams::OFFSETS),
            Numbers::Sum(_) => (SumParams::NAME, std::mem::size_of::<SumParams>(), SumParams::OFFSETS),
        }
    }

    /// The structure as a kernel reads it.
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
