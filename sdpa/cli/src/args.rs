//! The command line. Values are text here: [`crate::request`] parses them together, so that it can report all mistakes at once.

use crate::language::{mask_help, score_mod_help};
use crate::names::Named;
use crate::prove::args::{self as prove, ProveArgs, WorkerArgs};
use clap::{Args, Parser, Subcommand};
use sdpa::Packed;
use std::path::PathBuf;

const EXIT_CODES: &str = "\
Exit codes:
  0  done; with --check, every element is within its tolerance
  1  --check found an element past its tolerance
  2  mistakes in the arguments or in the input file, all of them listed; nothing was computed or written
  3  the executor asked for is not there or does not run the problem; doctor: no executor works
  4  something failed while it ran: the device, the disk, memory
  5  --check decides nothing: rounding may change some elements, or the gradient of a parameter, beyond recognition

RUST_LOG=debug tells more, on stderr.";

const COMPILE_EXIT_CODES: &str = "\
Exit codes:
  0  a plan was written for every pass
  2  mistakes in the arguments or in the file of problems, all of them listed; nothing was written
  3  there is no plan for some pass, with the reason; the others were written; or cuDNN is not there
  4  something failed while it ran: the library, the disk, memory

RUST_LOG=debug tells more, on stderr.";

/// Scaled dot product attention from the command line.
#[derive(Debug, Parser)]
#[command(name = "cargo-sdpa", bin_name = "cargo sdpa", version, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// One JSON object on stdout, for errors too
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Compute attention over a file or over random numbers; with neither, a small example that is checked
    #[command(after_help = EXIT_CODES)]
    Run(RunArgs),
    /// Print a stage on the way from a specification to a cuDNN plan
    #[command(after_help = EXIT_CODES)]
    Inspect(InspectArgs),
    /// Draw what score_mods make of the scores of one head, and what masks keep of them
    #[command(after_help = EXIT_CODES)]
    Show(ShowArgs),
    /// Compile plans for a device, which need not be there, into a plan file
    #[command(after_help = COMPILE_EXIT_CODES)]
    Compile(CompileArgs),
    /// Say who takes a problem, on which devices; else why not, and what would allow it
    #[command(after_help = EXIT_CODES)]
    Support(SupportArgs),
    /// Say everything that may be written in a score_mod and a mask
    Language,
    /// Look at the caches of plans of a program that ran, and at the kernel cache on disk
    Cache(CacheArgs),
    /// Say which executors work here, and what the others lack
    #[command(after_help = EXIT_CODES)]
    Doctor(DoctorArgs),
    /// Prove an executor: compute problems in which features meet, and check each
    #[command(long_about = prove::ABOUT, after_help = prove::EXIT_CODES)]
    Prove(ProveArgs),
    /// Answer questions of `prove`
    #[command(hide = true)]
    ProveWorker(WorkerArgs),
    /// Print a script that completes these arguments in a shell
    #[command(after_help = EXIT_CODES)]
    Completions(CompletionsArgs),
}

/// An attention problem.
#[derive(Debug, Args)]
pub(crate) struct ProblemArgs {
    /// Safetensors file with q, k and v, four axes each in the order of --layout
    #[arg(long, value_name = "F.safetensors")]
    pub(crate) input: Option<PathBuf>,
    /// Extents: batch, query heads, key heads, queries, keys, dim of q and k, dim of v (else the same)
    #[arg(long, value_name = "B,HQ,HKV,SQ,SKV,D[,DV]", allow_hyphen_values = true)]
    pub(crate) shape: Option<String>,
    /// Batch entries are packed documents, (total, heads, dim), the longest of SQ = SKV: where each begins and where the last one ends, in
    /// tokens; or input, for the --input's tensor cu_seqlens
    #[arg(long, value_name = "0,N,...|input", allow_hyphen_values = true)]
    pub(crate) cu_seqlens: Option<String>,
    /// The same of queries, where keys have boundaries of their own, or lie in pages: then they are as many as the input's tensor seq_len_kv says
    #[arg(long, value_name = "0,N,...|input", allow_hyphen_values = true)]
    pub(crate) cu_seqlens_q: Option<String>,
    /// The same of keys
    #[arg(long, value_name = "0,N,...|input", allow_hyphen_values = true)]
    pub(crate) cu_seqlens_kv: Option<String>,
    /// Documents whose boundaries nobody needs
    #[arg(skip)]
    pub(crate) packed: Option<Packed>,
    /// Keys and values lie in pages of so many tokens, (pages, tokens, heads, dim), as those of the --input do; which pages a batch entry has
    /// says its tensor page_table, [batch, pages of an entry], or --page-table. Over random numbers they are in any order
    #[arg(long, value_name = "PAGE_SIZE", allow_hyphen_values = true)]
    pub(crate) paged: Option<String>,
    /// How many pages there are for random numbers. Else as many as all keys take
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) pages: Option<String>,
    /// The pages of each batch entry: a text with a line of numbers for each
    #[arg(long, value_name = "F.txt")]
    pub(crate) page_table: Option<PathBuf>,
    /// f32, f16, bf16, or an 8-bit float, f8e4m3 or f8e5m2; converts the input. Else the file's, or bf16
    #[arg(long, value_parser = Named::elements(), hide_possible_values = true)]
    pub(crate) dtype: Option<String>,
    /// Element type of o beside 8-bit floats: f8e4m3, f8e5m2, f16 or bf16. Else that of q
    #[arg(long, value_parser = Named::elements(), hide_possible_values = true)]
    pub(crate) o_dtype: Option<String>,
    /// Scale each 32 elements of q, k and v by a power of two of their own (MXFP8), and no tensor: the input's block_scale_q, block_scale_k and
    /// block_scale_v, or made of its numbers; of 8-bit floats, forward
    #[arg(long)]
    pub(crate) block_scaled: bool,
    /// Order of the axes, outermost first: bhsd (as is usual), bshd or sbhd; of packed documents bshd or bhsd, without batch; of
    /// pages bshd where nothing is said
    #[arg(long, value_parser = Named::layouts(), hide_possible_values = true)]
    pub(crate) layout: Option<String>,
    #[arg(long, value_name = "SPEC", allow_hyphen_values = true, help = score_mod_help())]
    pub(crate) score_mod: Vec<String>,
    #[arg(long, value_name = "SPEC", allow_hyphen_values = true, help = mask_help())]
    pub(crate) mask: Vec<String>,
    /// Add the input's tensor bias to the scores, before the score_mods; with --backward also its gradient
    #[arg(long)]
    pub(crate) bias: bool,
    /// Put a number of each query head into the softmax's denominator, the input's tensor sink; with --backward also its gradient
    #[arg(long)]
    pub(crate) sink: bool,
    /// Drop weights at random with this probability, more than 0 and less than 1
    #[arg(long, value_name = "P", allow_hyphen_values = true)]
    pub(crate) dropout: Option<String>,
    /// What the random numbers of --dropout begin with; else 0
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) dropout_seed: Option<String>,
    /// Where in their sequence they begin; else 0
    #[arg(long, value_name = "N", allow_hyphen_values = true)]
    pub(crate) dropout_offset: Option<String>,
    /// Value of a declared scalar; may be repeated. Declared tensors are read from the --input by their names
    #[arg(long, value_name = "NAME=VALUE", allow_hyphen_values = true)]
    pub(crate) param: Vec<String>,
    /// Multiplies the scores. Else 1/sqrt(D)
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub(crate) scale: Option<String>,
    /// Also compute stats, the logarithm of each row's sum of exponentials; --output implies it
    #[arg(long)]
    pub(crate) stats: bool,
    /// Compute stats as logarithms to base two, not natural ones; not for --backward
    #[arg(long)]
    pub(crate) stats_base_2: bool,
    /// Also compute row_max, the largest score of each row
    #[arg(long)]
    pub(crate) row_max: bool,
    /// Also compute sum_exp, the sum of exponentials of each row, relative to its largest score
    #[arg(long)]
    pub(crate) sum_exp: bool,
}

/// The gradient of an attention problem.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct BackwardArgs {
    /// The backward pass: from do, dq, dk and dv. The forward pass is computed first where the input lacks o or stats
    #[arg(long)]
    pub(crate) backward: bool,
    /// Also the gradient of this declared parameter; may be repeated
    #[arg(long, value_name = "NAME")]
    pub(crate) wrt: Vec<String>,
    /// Element type of do beside 8-bit floats: f8e4m3 or f8e5m2. Else the input's, or that of q
    #[arg(long, value_parser = Named::elements(), hide_possible_values = true)]
    pub(crate) d_o_dtype: Option<String>,
    /// Element type of dq, dk and dv beside 8-bit floats: f8e4m3, f8e5m2, f16 or bf16. Else that of q
    #[arg(long, value_parser = Named::elements(), hide_possible_values = true)]
    pub(crate) gradient_dtype: Option<String>,
    /// The same bits on every run of the backward pass
    #[arg(long)]
    pub(crate) deterministic: bool,
}

/// Where NVIDIA's libraries are.
#[derive(Clone, Debug, Args)]
pub(crate) struct PlaceArgs {
    /// libcudnn.so.9 or its folder. Else CUDNN_GRAPH_LIBRARY, the active Python environment, the system
    #[arg(long, value_name = "PATH")]
    pub(crate) cudnn: Option<PathBuf>,
    /// libcuda.so.1. Else CUDNN_GRAPH_DRIVER, the system
    #[arg(long, value_name = "PATH")]
    pub(crate) driver: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) problem: ProblemArgs,
    #[command(flatten)]
    pub(crate) backward: BackwardArgs,
    #[command(flatten)]
    pub(crate) places: PlaceArgs,
    /// auto (the fastest that runs the problem), cpu, cuda, cudnn or metal
    #[arg(long, value_parser = Named::executors(), hide_possible_values = true)]
    pub(crate) executor: Option<String>,
    /// Time every configuration that cuDNN offers, and kernels of cuda beside the fastest; auto takes the fastest of all
    #[arg(long)]
    pub(crate) tune: bool,
    /// Take cuDNN's plans, or kernels of cuda, out of this file, which `compile`, --save-plans or a service made; repeatable
    #[arg(long, value_name = "PLANS")]
    pub(crate) plans: Vec<PathBuf>,
    /// Add the plans or the kernels that ran to this file
    #[arg(long, value_name = "PLANS")]
    pub(crate) save_plans: Option<PathBuf>,
    /// Compile kernels of cuda anew: neither look for them in the kernel cache on disk nor keep them there
    #[arg(long)]
    pub(crate) no_kernel_cache: bool,
    /// Write what is computed to this file
    #[arg(long, value_name = "O.safetensors")]
    pub(crate) output: Option<PathBuf>,
    /// Compare with textbook attention in f64
    #[arg(long)]
    pub(crate) check: bool,
    /// Seed of the random numbers. Else 0
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) problem: ProblemArgs,
    #[command(flatten)]
    pub(crate) backward: BackwardArgs,
    #[command(flatten)]
    pub(crate) places: PlaceArgs,
    /// spec, problem, trace, gradient, graph, program, schedule, plan or kernel. Else graph
    #[arg(long, value_parser = Named::stages(), hide_possible_values = true)]
    pub(crate) stage: Option<String>,
    /// Executor of the schedule: cudnn or cuda [default: cudnn]
    #[arg(long, value_parser = Named::schedulers(), hide_possible_values = true)]
    pub(crate) executor: Option<String>,
    /// composite or unified. Else the one that is asked first; for a plan, the other one after it
    #[arg(long, value_parser = Named::forms(), hide_possible_values = true)]
    pub(crate) form: Option<String>,
    /// Version of cuDNN to lower for (graph, program, schedule). Else that of the library found, or 9.27.0
    #[arg(long, value_name = "9.19.0")]
    pub(crate) runtime: Option<String>,
    /// Device of a plan, a kernel or a schedule of cuda, as a JSON file; no GPU is needed [default: an H200, of a plan this machine's]
    #[arg(long, value_name = "FILE")]
    pub(crate) device_profile: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    pub(crate) problem: ProblemArgs,
    /// The query head that is shown. Else 0
    #[arg(long, value_name = "H")]
    pub(crate) head: Option<String>,
    /// The batch entry that is shown. Else 0
    #[arg(long, value_name = "B")]
    pub(crate) batch: Option<String>,
    /// The score that goes in everywhere. Else those of the --input, or 0
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub(crate) score: Option<String>,
    /// The picture. Else score_mod.svg
    #[arg(long, value_name = "F.svg|F.png")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct SupportArgs {
    #[command(flatten)]
    pub(crate) problem: ProblemArgs,
    #[command(flatten)]
    pub(crate) backward: BackwardArgs,
    /// a100, l40s, h200, b200, or a JSON file that describes a device; repeatable. Else these four
    #[arg(long, value_name = "NAME|FILE.json")]
    pub(crate) device: Vec<String>,
    /// libcudnn.so.9 or its folder; or a version, as in 9.13, of which only rules are asked where another is found. Else CUDNN_GRAPH_LIBRARY,
    /// the active Python environment, the system
    #[arg(long, value_name = "PATH|VERSION")]
    pub(crate) cudnn: Option<String>,
    /// libcuda.so.1. Else CUDNN_GRAPH_DRIVER, the system, or the stand-in that this program includes
    #[arg(long, value_name = "PATH")]
    pub(crate) driver: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CompileArgs {
    /// TOML file with a table [[problem]] for each problem: shape = [B, HQ, HKV, SQ, SKV, D], and name, dtype, layout, score_mod,
    /// mask, bias, stats, backward, wrt and deterministic as the options of run, and packed = { total_q = N, cross = BOOL, total_kv = N }
    #[arg(long, value_name = "FILE.toml")]
    pub(crate) problems: PathBuf,
    /// cudnn, of which plans are made, or cuda, of which kernels are
    #[arg(long, value_parser = ["cudnn", "cuda"], default_value = "cudnn", hide_possible_values = true)]
    pub(crate) executor: Option<String>,
    /// a100, l40s, h200, b200, or a JSON file that describes a device
    #[arg(long, value_name = "NAME|FILE.json")]
    pub(crate) device: String,
    /// libcudnn.so.9 or its folder; or the version that the one found must have, as in 9.19. Else CUDNN_GRAPH_LIBRARY, the active
    /// Python environment, the system
    #[arg(long, value_name = "PATH|VERSION")]
    pub(crate) cudnn: Option<String>,
    /// libcuda.so.1. Else CUDNN_GRAPH_DRIVER, the system, or the stand-in that this program includes
    #[arg(long, value_name = "PATH")]
    pub(crate) driver: Option<PathBuf>,
    /// For cuda: libnvrtc.so.13 or its folder. Else SDPA_NVRTC, the active Python environment, the system
    #[arg(long, value_name = "PATH")]
    pub(crate) nvrtc: Option<PathBuf>,
    /// The plan file; what it has already for this device and cuDNN stays. Kernels of cuda have files of their own
    #[arg(long, value_name = "PLANS")]
    pub(crate) out: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct CacheArgs {
    #[command(subcommand)]
    pub(crate) command: CacheCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum CacheCommand {
    /// Make a page of a trace: what was built, why, how long it took, and what to change
    #[command(after_help = EXIT_CODES)]
    Report(CacheReportArgs),
    /// Print the folder of the kernel cache on disk, and how much it has
    #[command(after_help = EXIT_CODES)]
    Info,
    /// Delete every kernel of the kernel cache on disk
    #[command(after_help = EXIT_CODES)]
    Clear,
}

#[derive(Debug, Args)]
pub(crate) struct CacheReportArgs {
    /// What CudnnExecutor::cache_trace gave, as JSON
    #[arg(value_name = "TRACE.json")]
    pub(crate) trace: PathBuf,
    /// The page. Else cache.html
    #[arg(long, value_name = "F.html")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) places: PlaceArgs,
}

#[derive(Debug, Args)]
pub(crate) struct CompletionsArgs {
    /// The shell
    pub(crate) shell: clap_complete::Shell,
}
