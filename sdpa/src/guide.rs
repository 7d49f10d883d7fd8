//! Guides to this library. This module contains only documentation.
//!
//! Pages may link to others that are not here: benchmarks, support tables, building and testing. These are in `docs/` of the repository.

// Pages link to each other by file name. `links.md` maps these names to items here, and comes first because Markdown uses the first
// definition of a link.
macro_rules! pages {
    ($($(#[$when:meta])* $name:ident $file:literal)*) => {
        $(
            $(#[$when])*
            #[doc = include_str!("../docs/links.md")]
            #[doc = include_str!(concat!("../docs/", $file))]
            pub mod $name {}
        )*
    };
}

pages! {
    installation "installation.md"
    getting_started "getting-started.md"
    migration "migration.md"
    masks "masks.md"
    score_mods "score_mods.md"
    training "training.md"
    dropout_and_sinks "dropout-and-sinks.md"
    // cudarc is not available on Apple platforms: the page is shown there, but its code blocks do not compile.
    #[cfg(all(feature = "cudarc", any(feature = "cudnn", feature = "cuda"), any(not(doctest), not(target_vendor = "apple"))))]
    gpu_buffers "gpu-buffers.md"
    packed "packed.md"
    paged "paged.md"
    expressions "expressions.md"
    numerics "numerics.md"
    wrong_results "wrong-results.md"
    #[cfg(feature = "cudnn")]
    ledger "ledger.md"
    #[cfg(feature = "cuda")]
    cuda "cuda.md"
    cache "cache.md"
    ahead_of_time "ahead-of-time.md"
    threads "threads.md"
    merging "merging.md"
    #[cfg(feature = "distributed")]
    several_gpus "several-gpus.md"
    fp8 "fp8.md"
    cli "cli.md"
}
