//! The command line. Values are text here: [`crate::request`] parses them together, so that it can report all mistakes at once.

use crate::language::{MASK_HELP, SCORE_MOD_HELP, mask_help, score_mod_help};
use crate::names::Named;
use crate::prove::args::{self as prove, ProveArgs, WorkerArgs};
use clap::{Args, Parser, Subcommand};
use sdpa::Packed;
use std::path::PathBuf;

const EXIT_CODES: &str = "\
Exit codes:
  0  done; with --check, every element is within its tolerance
  1  --check found an element outside its tolerance
  2  mistakes in the arguments or the input file, all listed; nothing was computed or written
  3  the executor is absent or does not support the problem; doctor: no executor works
  4  failure at run time: device, disk or memory
  5  --check is undecided: rounding may change some elements beyond recognition

RUST_LOG=debug prints more on stderr.";

const COMPILE_EXIT_CODES: &str = "\
Exit codes:
  0  a plan was written for every pass
  2  mistakes in the arguments or the file of problems, all listed; nothing was written
  3  some pass has no plan, with the reason, and the others were written; or cuDNN is absent
  4  failure at run time: library, disk or memory

RUST_LOG=debug prints more on stderr.";

const SEQUENCES: &str = "Packed sequences and paged KV cache";
const FUNCTIONS: &str = "Masks, score_mods and the softmax";
const RESULTS: &str = "Results";
const EXECUTION: &str = "Execution";
const LIBRARIES: &str = "Libraries";

/// Scaled dot product attention from the command line.
#[derive(Debug, Parser)]
#[command(name = "cargo-sdpa", bin_name = "cargo sdpa", version, max_term_width = 120, after_help = EXIT_CODES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Print one JSON object on stdout, for errors too
    #[arg(long, global = true)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Compute attention over a file or random numbers [default: a checked example]
    Run(RunArgs),
    /// Print a stage on the way from a specification to a cuDNN plan
    Inspect(InspectArgs),
    /// Draw the scores of one head after score_mods and masks
    Show(ShowArgs),
    /// Compile plans or kernels into a file, for any device; no GPU is needed
    #[command(after_long_help = COMPILE_EXIT_CODES)]
    Compile(CompileArgs),
    /// List executors and devices that support a problem, and why others do not
    Support(SupportArgs),
    /// Print the expression language of score_mods and masks
    Language,
    /// Report on plan caches of a program, or manage the kernel cache on disk
    Cache(CacheArgs),
    /// Check which executors work here, and what the others lack
    Doctor(DoctorArgs),
    /// Prove an executor: compute and check problems that combine features
    #[command(long_about = prove::ABOUT, after_long_help = prove::EXIT_CODES)]
    Prove(ProveArgs),
    /// Answer questions of `prove`
    #[command(hide = true)]
    ProveWorker(WorkerArgs),
    /// Print a script that completes these arguments in a shell
    Completions(CompletionsArgs),
}

/// An attention problem.
#[derive(Debug, Args)]
pub(crate) struct ProblemArgs {
    /// Read q, k and v from this safetensors file; --layout orders their axes
    #[arg(long, value_name = "F.safetensors")]
    pub(crate) input: Option<PathBuf>,
    /// Use random numbers of this shape; DV defaults to D
    ///
    /// B is the batch, HQ and HKV are the numbers of query and KV heads, SQ and SKV the numbers of queries and keys, D the head dim of q and k, DV that of v.
    #[arg(long, value_name = "B,HQ,HKV,SQ,SKV,D[,DV]", allow_hyphen_values = true)]
    pub(crate) shape: Option<String>,
    /// Pack sequences (varlen): cu_seqlens, batch + 1 offsets in tokens
    ///
    /// `input` reads the tensor cu_seqlens of the file. Operands are (total, heads, dim). SQ and SKV of --shape are equal, and are the length of
    /// the longest sequence.
    #[arg(long, value_name = "0,N,...|input", allow_hyphen_values = true, help_heading = SEQUENCES)]
    pub(crate) cu_seqlens: Option<String>,
    /// Set cu_seqlens of the queries, together with --cu-seqlens-kv or --paged
    ///
    /// With --paged, the tensor seq_len_kv of the file has the lengths of the keys.
    #[arg(long, value_name = "0,N,...|input", allow_hyphen_values = true, help_heading = SEQUENCES)]
    pub(crate) cu_seqlens_q: Option<String>,
    /// Set cu_seqlens of the keys, together with --cu-seqlens-q
    #[arg(long, value_name = "0,N,...|input", allow_hyphen_values = true, help_heading = SEQUENCES)]
    pub(crate) cu_seqlens_kv: Option<String>,
    /// Packing without offsets, for problems that are described but not computed
    #[arg(skip)]
    pub(crate) packed: Option<Packed>,
    /// Read k and v from a paged KV cache with this many tokens per page
    ///
    /// k and v are (pages, tokens, heads, dim). The pages of each batch entry are in the tensor page_table of the file, [batch, pages of an
    /// entry], or in --page-table. Over random numbers they are in random order.
    #[arg(long, value_name = "PAGE_SIZE", allow_hyphen_values = true, help_heading = SEQUENCES)]
    pub(crate) paged: Option<String>,
    /// Allocate this many pages for random numbers [default: as many as all keys need]
    #[arg(long, value_name = "N", allow_hyphen_values = true, help_heading = SEQUENCES)]
    pub(crate) pages: Option<String>,
    /// Read the page table from this text file
    ///
    /// The file has one line of page indices per batch entry.
    #[arg(long, value_name = "F.txt", help_heading = SEQUENCES)]
    pub(crate) page_table: Option<PathBuf>,
    /// Convert to f32, f16, bf16, f8e4m3 or f8e5m2 [default: as the file, or bf16]
    #[arg(long, value_parser = Named::elements(), hide_possible_values = true)]
    pub(crate) dtype: Option<String>,
    /// Set the type of o for 8-bit inputs [default: that of q]
    ///
    /// Possible types: f8e4m3, f8e5m2, f16, bf16.
    #[arg(long, value_parser = Named::elements(), hide_possible_values = true)]
    pub(crate) o_dtype: Option<String>,
    /// Scale every 32 elements of q, k and v by a power of two (MXFP8, forward only)
    ///
    /// The scales are the tensors block_scale_q, block_scale_k and block_scale_v of the file, or are computed from its numbers.
    #[arg(long)]
    pub(crate) block_scaled: bool,
    /// Order the axes, outermost first: bhsd, bshd or sbhd [default: bhsd]
    ///
    /// The default with --paged is bshd. Packed sequences are bshd or bhsd without the batch.
    #[arg(long, value_parser = Named::layouts(), hide_possible_values = true)]
    pub(crate) layout: Option<String>,
    #[arg(long, value_name = "SPEC", allow_hyphen_values = true, help = SCORE_MOD_HELP, long_help = score_mod_help(), help_heading = FUNCTIONS)]
    pub(crate) score_mod: Vec<String>,
    #[arg(long, value_name = "SPEC", allow_hyphen_values = true, help = MASK_HELP, long_help = mask_help(), help_heading = FUNCTIONS)]
    pub(crate) mask: Vec<String>,
    /// Add the tensor bias of the file to the scores, before the score_mods
    ///
    /// With --backward its gradient is computed as well.
    #[arg(long, help_heading = FUNCTIONS)]
    pub(crate) bias: bool,
    /// Add an attention sink per query head: the tensor sink of the file
    ///
    /// With --backward its gradient is computed as well.
    #[arg(long, help_heading = FUNCTIONS)]
    pub(crate) sink: bool,
    /// Drop entries of P with this probability, above 0 and below 1
    #[arg(long, value_name = "P", allow_hyphen_values = true, help_heading = FUNCTIONS)]
    pub(crate) dropout: Option<String>,
    /// Seed the random numbers of --dropout [default: 0]
    #[arg(long, value_name = "N", allow_hyphen_values = true, help_heading = FUNCTIONS)]
    pub(crate) dropout_seed: Option<String>,
    /// Start the random numbers of --dropout at this offset [default: 0]
    #[arg(long, value_name = "N", allow_hyphen_values = true, help_heading = FUNCTIONS)]
    pub(crate) dropout_offset: Option<String>,
    /// Set a declared scalar; repeatable
    ///
    /// Declared tensors are read from the file by their names.
    #[arg(long, value_name = "NAME=VALUE", allow_hyphen_values = true, help_heading = FUNCTIONS)]
    pub(crate) param: Vec<String>,
    /// Multiply the scores by this number [default: 1/sqrt(D)]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = FUNCTIONS)]
    pub(crate) scale: Option<String>,
    /// Compute stats, the log-sum-exp of each row; implied by --output
    #[arg(long, help_heading = RESULTS)]
    pub(crate) stats: bool,
    /// Compute stats as base-2 logarithms; not with --backward
    #[arg(long, help_heading = RESULTS)]
    pub(crate) stats_base_2: bool,
    /// Compute row_max, the largest score of each row
    #[arg(long, help_heading = RESULTS)]
    pub(crate) row_max: bool,
    /// Compute sum_exp, each row's sum of exponentials relative to its largest score
    #[arg(long, help_heading = RESULTS)]
    pub(crate) sum_exp: bool,
    /// Compute results whose bits do not depend on the other sequences of a call
    #[arg(long, help_heading = RESULTS)]
    pub(crate) batch_invariant: bool,
}

/// The gradient of an attention problem.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct BackwardArgs {
    /// Compute dq, dk and dv from do
    ///
    /// The forward pass is computed first if the file lacks o or stats.
    #[arg(long, help_heading = "Backward pass")]
    pub(crate) backward: bool,
    /// Compute the gradient of this declared parameter as well; repeatable
    #[arg(long, value_name = "NAME", help_heading = "Backward pass")]
    pub(crate) wrt: Vec<String>,
    /// Set the type of do for 8-bit inputs [default: as the file, or as q]
    ///
    /// Possible types: f8e4m3, f8e5m2.
    #[arg(long, value_parser = Named::elements(), hide_possible_values = true, help_heading = "Backward pass")]
    pub(crate) d_o_dtype: Option<String>,
    /// Set the type of dq, dk and dv for 8-bit inputs [default: that of q]
    ///
    /// Possible types: f8e4m3, f8e5m2, f16, bf16.
    #[arg(long, value_parser = Named::elements(), hide_possible_values = true, help_heading = "Backward pass")]
    pub(crate) gradient_dtype: Option<String>,
    /// Compute bitwise equal results on every run
    #[arg(long, help_heading = "Backward pass")]
    pub(crate) deterministic: bool,
}

/// Where NVIDIA's libraries are.
#[derive(Clone, Debug, Args)]
pub(crate) struct PlaceArgs {
    /// Load libcudnn.so.9 from this file or folder [default: the first found]
    ///
    /// The search order is CUDNN_GRAPH_LIBRARY, the active Python environment, the system.
    #[arg(long, value_name = "PATH", help_heading = LIBRARIES)]
    pub(crate) cudnn: Option<PathBuf>,
    /// Load libcuda.so.1 from this file [default: CUDNN_GRAPH_DRIVER, the system]
    #[arg(long, value_name = "PATH", help_heading = LIBRARIES)]
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
    /// Run on auto (the executor selection), cpu, cuda, cudnn or metal [default: auto]
    #[arg(long, value_parser = Named::executors(), hide_possible_values = true, help_heading = EXECUTION)]
    pub(crate) executor: Option<String>,
    /// Time cuDNN's configurations and native CUDA kernels; auto selects the fastest
    #[arg(long, help_heading = EXECUTION)]
    pub(crate) tune: bool,
    /// Load plans of cuDNN or kernels of cuda from this file; repeatable
    ///
    /// `compile`, --save-plans and services write such files.
    #[arg(long, value_name = "PLANS", help_heading = EXECUTION)]
    pub(crate) plans: Vec<PathBuf>,
    /// Add the plans or kernels that ran to this file
    #[arg(long, value_name = "PLANS", help_heading = EXECUTION)]
    pub(crate) save_plans: Option<PathBuf>,
    /// Compile kernels of cuda anew, without the kernel cache on disk
    #[arg(long, help_heading = EXECUTION)]
    pub(crate) no_kernel_cache: bool,
    /// Write the results to this file
    #[arg(long, value_name = "O.safetensors", help_heading = RESULTS)]
    pub(crate) output: Option<PathBuf>,
    /// Compare the results with textbook attention in f64
    #[arg(long, help_heading = RESULTS)]
    pub(crate) check: bool,
    /// Seed the random numbers [default: 0]
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
    /// Print this stage [default: graph]
    ///
    /// Possible stages: spec, problem, trace, gradient, graph, program, schedule, plan, kernel.
    #[arg(long, value_parser = Named::stages(), hide_possible_values = true)]
    pub(crate) stage: Option<String>,
    /// Print the schedule of cudnn or cuda [default: cudnn]
    #[arg(long, value_parser = Named::schedulers(), hide_possible_values = true)]
    pub(crate) executor: Option<String>,
    /// Lower to the composite or the unified form [default: the first tried]
    ///
    /// Without this option, a plan tries both forms.
    #[arg(long, value_parser = Named::forms(), hide_possible_values = true)]
    pub(crate) form: Option<String>,
    /// Lower for this version of cuDNN [default: that of the library, or 9.27.0]
    ///
    /// Only the stages graph, program and schedule use it.
    #[arg(long, value_name = "9.19.0")]
    pub(crate) runtime: Option<String>,
    /// Plan for the device that this JSON file describes [default: an H200]
    ///
    /// The stage plan uses this machine's GPU by default. With a file it needs no GPU.
    #[arg(long, value_name = "FILE")]
    pub(crate) device_profile: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    pub(crate) problem: ProblemArgs,
    /// Show this query head [default: 0]
    #[arg(long, value_name = "H")]
    pub(crate) head: Option<String>,
    /// Show this batch entry [default: 0]
    #[arg(long, value_name = "B")]
    pub(crate) batch: Option<String>,
    /// Start from this score everywhere [default: the file's scores, or 0]
    #[arg(long, value_name = "X", allow_hyphen_values = true)]
    pub(crate) score: Option<String>,
    /// Write the picture to this file [default: score_mod.svg]
    #[arg(long, value_name = "F.svg|F.png")]
    pub(crate) output: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct SupportArgs {
    #[command(flatten)]
    pub(crate) problem: ProblemArgs,
    #[command(flatten)]
    pub(crate) backward: BackwardArgs,
    /// Check a100, l40s, h200, b200 or a JSON file; repeatable [default: all four]
    ///
    /// The JSON file describes a device, like the files in cudnn-graph/devprops.
    #[arg(long, value_name = "NAME|FILE.json")]
    pub(crate) device: Vec<String>,
    /// Check this libcudnn.so.9, its folder, or a version [default: the first found]
    ///
    /// The search order is CUDNN_GRAPH_LIBRARY, the active Python environment, the system. A version is written as 9.13. If the library
    /// found has another version, only the known rules of the version are checked.
    #[arg(long, value_name = "PATH|VERSION", help_heading = LIBRARIES)]
    pub(crate) cudnn: Option<String>,
    /// Load libcuda.so.1 from this file [default: the first found, or a stand-in]
    ///
    /// The search order is CUDNN_GRAPH_DRIVER, the system, the stand-in that this program includes.
    #[arg(long, value_name = "PATH", help_heading = LIBRARIES)]
    pub(crate) driver: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct CompileArgs {
    /// Read the problems from this TOML file, a table [[problem]] for each
    ///
    /// Keys: shape = [B, HQ, HKV, SQ, SKV, D]; name, dtype, layout, score_mod, mask, bias, stats, backward, wrt and deterministic as the options
    /// of run; packed = { total_q = N, cross = BOOL, total_kv = N }.
    #[arg(long, value_name = "FILE.toml")]
    pub(crate) problems: PathBuf,
    /// Make plans of cudnn or kernels of cuda
    #[arg(long, value_parser = ["cudnn", "cuda"], default_value = "cudnn", hide_possible_values = true)]
    pub(crate) executor: Option<String>,
    /// Compile for a100, l40s, h200, b200 or the device that a JSON file describes
    #[arg(long, value_name = "NAME|FILE.json")]
    pub(crate) device: String,
    /// Load this libcudnn.so.9, or require a version [default: the first found]
    ///
    /// The search order is CUDNN_GRAPH_LIBRARY, the active Python environment, the system. A version is written as 9.19.
    #[arg(long, value_name = "PATH|VERSION", help_heading = LIBRARIES)]
    pub(crate) cudnn: Option<String>,
    /// Load libcuda.so.1 from this file [default: the first found, or a stand-in]
    ///
    /// The search order is CUDNN_GRAPH_DRIVER, the system, the stand-in that this program includes.
    #[arg(long, value_name = "PATH", help_heading = LIBRARIES)]
    pub(crate) driver: Option<PathBuf>,
    /// Load libnvrtc.so.13 from this file or folder [default: the first found]
    ///
    /// Kernels of cuda need it. The search order is SDPA_NVRTC, the active Python environment, the system.
    #[arg(long, value_name = "PATH", help_heading = LIBRARIES)]
    pub(crate) nvrtc: Option<PathBuf>,
    /// Write the plan file here; existing plans for this device and cuDNN remain
    ///
    /// Kernels of cuda go to a file of their own.
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
    /// Make an HTML page of a cache trace: builds, reasons, times and advice
    Report(CacheReportArgs),
    /// Print the folder and the size of the kernel cache on disk
    Info,
    /// Delete every kernel of the kernel cache on disk
    Clear,
}

#[derive(Debug, Args)]
pub(crate) struct CacheReportArgs {
    /// JSON file with the result of CudnnExecutor::cache_trace
    #[arg(value_name = "TRACE.json")]
    pub(crate) trace: PathBuf,
    /// Write the page to this file [default: cache.html]
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

#[cfg(test)]
mod tests {
    use super::Cli;
    use clap::{Command, CommandFactory as _};

    /// The first line of each help text, with the command and the argument that it belongs to.
    fn summaries(command: &Command, of: &str, into: &mut Vec<(String, String)>) {
        let name = format!("{of} {}", command.get_name());
        into.extend(command.get_about().map(|about| (name.clone(), about.to_string())));
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            into.push((format!("{name} {}", arg.get_id()), arg.get_help().map(ToString::to_string).unwrap_or_default()));
        }
        command.get_subcommands().filter(|command| !command.is_hide_set()).for_each(|command| summaries(command, &name, into));
    }

    #[test]
    fn a_summary_is_one_short_line() {
        let mut all = Vec::new();
        summaries(&Cli::command(), "", &mut all);
        assert!(all.len() > 150, "{}", all.len());
        let wrong = |text: &str| text.is_empty() || text.chars().count() > 80 || text.contains('\n') || text.ends_with('.');
        let wrong: Vec<_> = all.iter().filter(|(_, text)| wrong(text)).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}
