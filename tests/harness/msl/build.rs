//! Compiles plans, and runs them.

use crate::golden::repository;
use metal_fallback::{Operand, Plan};
use std::collections::BTreeMap;
use std::collections::hash_map::DefaultHasher;
use std::fmt::Write;
use std::hash::{Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Every warning is one of the kernels': attributes and pragmas of MSL are all that clang does not know.
const FLAGS: [&str; 13] = [
    "-std=c++14",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    // An offset that is kept in 32 bits: no test has tensors that large.
    "-Wshorten-64-to-32",
    "-Wno-unknown-attributes",
    // Those of Metal.
    "-Wno-unknown-pragmas",
    "-Wno-unused-function",
    // A trace need not read all that it is given.
    "-Wno-unused-parameter",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-math-errno",
];

/// What is looked for besides wrong numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Check {
    /// What the emulation itself sees, and what comes of variables that are NaN before they are written.
    Plain,
    /// Threads that touch the same place with no barrier between them.
    Races,
    /// Accesses out of arrays, undefined behaviour, conversions that lose something.
    Addresses,
    /// Branches and results that depend on what was never written.
    Memory,
}

impl Check {
    /// All of them.
    pub const ALL: [Check; 4] = [Check::Plain, Check::Races, Check::Addresses, Check::Memory];
    /// Those of clang's sanitizers.
    pub const SANITIZERS: [Check; 3] = [Check::Races, Check::Addresses, Check::Memory];

    /// Flags for the kernel, and those for the machine that runs it.
    fn flags(self) -> [&'static [&'static str]; 2] {
        match self {
            // Nothing of C++'s library is used, and a program that does not load it begins sooner.
            Check::Plain => [&["-ftrivial-auto-var-init=pattern", "-s", "-nostdlib++"], &["-O2"]],
            // The machine stands between the threads and must not be taken for one of them.
            Check::Races => [&["-fsanitize=thread", "-g1"], &["-DCHECK_RACES"]],
            Check::Addresses => {
                [&["-fsanitize=address,undefined,implicit-conversion", "-fno-sanitize-recover=all", "-g1"], &["-fsanitize=address"]]
            }
            Check::Memory => [&["-fsanitize=memory", "-fsanitize-memory-track-origins", "-g1"], &["-fsanitize=memory"]],
        }
    }
}

/// The compiler that programs are built with, and where they are kept.
#[derive(Clone, Debug)]
pub struct Toolchain {
    compiler: String,
    version: String,
    folder: PathBuf,
    check: Check,
    /// A faster linker, where there is one: a program is linked in half of the time.
    linker: Option<&'static str>,
    /// Of sources that somebody has put faults into: warnings are none of the kernels', programs may run for ever and are not kept.
    faulty: bool,
}

const KERNEL: &str = "kernel";

const GOLD: &str = "-fuse-ld=gold";

static UNIQUE: AtomicU64 = AtomicU64::new(0);

/// Places that somebody in this process makes something for: the same case often runs twice side by side, and each would compile it.
static MADE: Mutex<BTreeMap<PathBuf, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());

fn unique() -> String {
    format!("{}-{}", std::process::id(), UNIQUE.fetch_add(1, Ordering::Relaxed))
}

fn output(command: &mut Command) -> Result<String, String> {
    let done = command.output().map_err(|e| format!("{:?}: {e}", command.get_program()))?;
    if done.status.success() {
        return Ok(String::from_utf8_lossy(&done.stdout).into_owned());
    }
    Err(format!("{}: {}", done.status, String::from_utf8_lossy(&done.stderr).trim()))
}

/// Seconds after which a program with a fault is taken to run for ever: others take far less than one.
const HANGS: &str = "60";

/// Runs a program; one with a fault for a while only.
fn command(program: &Path, faulty: bool) -> Command {
    if !faulty {
        return Command::new(program);
    }
    let mut command = Command::new("timeout");
    command.arg(HANGS).arg(program);
    command
}

impl Toolchain {
    /// Finds clang.
    ///
    /// # Errors
    /// Why nothing can be emulated on this machine.
    pub fn find() -> Result<Toolchain, String> {
        if !cfg!(all(target_os = "linux", target_arch = "x86_64")) {
            return Err("the emulation of MSL is written for Linux on x86-64".to_owned());
        }
        let names = ["clang++".to_owned()].into_iter().chain((14..=22).rev().map(|version| format!("clang++-{version}")));
        let found = names.map(|name| (output(Command::new(&name).arg("--version")), name)).find(|(version, _)| version.is_ok());
        let Some((Ok(version), compiler)) = found else {
            return Err("there is no clang++ (on Debian: apt-get install clang)".to_owned());
        };
        let here = std::env::current_exe().map_err(|e| e.to_string())?;
        let folder = here.parent().unwrap_or(Path::new(".")).join("msl");
        std::fs::create_dir_all(&folder).map_err(|e| format!("{}: {e}", folder.display()))?;
        let gold = output(Command::new(&compiler).args([GOLD, "-Wl,--version"]));
        Ok(Toolchain { compiler, version, folder, check: Check::Plain, linker: gold.is_ok().then_some(GOLD), faulty: false })
    }

    /// The same, looking for something else.
    #[must_use]
    pub fn with(&self, check: Check) -> Toolchain {
        Toolchain { check, ..self.clone() }
    }

    /// What is looked for.
    pub fn check(&self) -> Check {
        self.check
    }

    /// The same for sources with faults.
    #[must_use]
    pub fn of_faults(&self) -> Toolchain {
        Toolchain { faulty: true, ..self.clone() }
    }

    /// Whether programs are there for the next run: those with sanitizers are a hundred times as large as the others.
    fn keeps(&self) -> bool {
        self.check == Check::Plain && !self.faulty
    }

    fn emulator(&self) -> PathBuf {
        repository("tests/metal/emulator")
    }

    /// Runs the compiler where nothing else did with the same text. Programs are made beside their place and moved, so that processes
    /// side by side do not read halves.
    /// Whether the place is kept.
    fn made(&self, kind: &str, text: &str, make: impl FnOnce(&Path, &Path) -> Result<String, String>) -> Result<(PathBuf, bool), String> {
        let mut hasher = DefaultHasher::new();
        (&self.compiler, &self.version, FLAGS, self.check.flags(), kind, text).hash(&mut hasher);
        for file in ["machine.h", "machine.cpp", "numbers.h", "metal_stdlib", "metal_simdgroup_matrix"] {
            std::fs::read_to_string(self.emulator().join(file)).map_err(|e| format!("{file}: {e}"))?.hash(&mut hasher);
        }
        let mut place = self.folder.join(format!("{kind}-{:016x}", hasher.finish()));
        let kept = kind != KERNEL || self.keeps();
        let turn = kept.then(|| MADE.lock().unwrap_or_else(PoisonError::into_inner).entry(place.clone()).or_default().clone());
        let _turn = turn.as_ref().map(|turn| turn.lock().unwrap_or_else(PoisonError::into_inner));
        if place.exists() {
            return Ok((place, true));
        }
        if !kept {
            place = self.folder.join(format!("{kind}-{}", unique()));
        }
        let source = self.folder.join(format!("{}.cpp", unique()));
        let part = self.folder.join(format!("{}.part", unique()));
        std::fs::write(&source, text).map_err(|e| e.to_string())?;
        let made = make(&source, &part);
        // Kept where it does not compile, to be looked at.
        if let Err(e) = made {
            if self.faulty {
                let _ = std::fs::remove_file(&source);
            }
            return Err(format!("{}: {e}", source.display()));
        }
        std::fs::rename(&part, &place).map_err(|e| e.to_string())?;
        let _ = std::fs::remove_file(&source);
        Ok((place, kept))
    }

    fn compile(&self, from: &Path, to: &Path, flags: &[&str], more: &[&std::ffi::OsStr]) -> Result<String, String> {
        // Compiled for each fault, and run a few times: without optimisation that is faster.
        let faulty = self.faulty.then_some(["-Wno-error", "-O0"]).into_iter().flatten();
        let include = [std::ffi::OsString::from("-I"), self.emulator().into_os_string()];
        output(Command::new(&self.compiler).args(FLAGS).args(faulty).args(flags).args(include).args(more).arg(from).arg("-o").arg(to))
    }

    /// Parses the source of a plan with address spaces that are apart, as they are on a GPU.
    ///
    /// # Errors
    /// What the compiler says.
    pub fn check_spaces(&self, plan: &Plan) -> Result<(), String> {
        let text = plan.source.replace("[[threadgroup(", "[[threadgroup_memory(");
        let source = self.folder.join(format!("{}.cpp", unique()));
        std::fs::write(&source, text).map_err(|e| e.to_string())?;
        // Types only: the instructions are what clang needs to know half.
        let flags = ["-fsyntax-only", "-DCHECK_SPACES", "-mavx512fp16"];
        let said = output(Command::new(&self.compiler).args(FLAGS).args(flags).arg("-I").arg(self.emulator()).arg(&source));
        let _ = std::fs::remove_file(&source);
        said.map(|_| ())
    }

    /// The arguments and the body of a plan's kernel, with every macro replaced.
    ///
    /// # Errors
    /// What the compiler says; a kernel that is not there.
    pub fn kernel(&self, plan: &Plan) -> Result<[String; 2], String> {
        let text = plan.source.replace("[[threadgroup(", "[[threadgroup_memory(");
        let source = self.folder.join(format!("{}.cpp", unique()));
        std::fs::write(&source, text).map_err(|e| e.to_string())?;
        let text = output(Command::new(&self.compiler).args(["-E", "-P", "-I"]).arg(self.emulator()).arg(&source));
        let _ = std::fs::remove_file(&source);
        let text = text?;
        let (_, kernel) = text.split_once(&format!("void {}(", plan.entry)).ok_or("the kernel is not in its source")?;
        let (arguments, body) = kernel.split_once('{').ok_or("the kernel has no body")?;
        Ok([arguments.to_owned(), body.to_owned()])
    }

    /// The indices of the buffers and of the threadgroup memory that a kernel declares among its arguments, in its order.
    pub fn slots(arguments: &str) -> [Vec<u32>; 2] {
        ["buffer", "threadgroup_memory"].map(|attribute| {
            let opening = format!("[[{attribute}(");
            let found = arguments.split(opening.as_str()).skip(1);
            found.filter_map(|rest| rest.split(')').next()?.parse().ok()).collect()
        })
    }

    /// Compiles a text by itself, and runs it; what it prints.
    ///
    /// # Errors
    /// What the compiler says, or how the program ended.
    pub fn print(&self, text: &str) -> Result<String, String> {
        let [flags, _] = if self.check == Check::Plain { [&[] as &[&str]; 2] } else { self.check.flags() };
        let (path, _) = self.made("text", text, |from, to| self.compile(from, to, flags, &[]))?;
        output(&mut command(&path, self.faulty))
    }

    /// The program of a plan.
    ///
    /// # Errors
    /// What the compiler says.
    pub fn program(&self, plan: &Plan) -> Result<Program, String> {
        let [kernel_flags, machine_flags] = self.check.flags();
        let machine = std::fs::read_to_string(self.emulator().join("machine.cpp")).map_err(|e| e.to_string())?;
        let (object, _) = self.made("machine", &machine, |from, to| self.compile(from, to, machine_flags, &["-c".as_ref()]))?;
        // The address space is a macro, and here it would be replaced too.
        let source = plan.source.replace("[[threadgroup(", "[[threadgroup_memory(");
        let text = format!("{source}\n{}", call(plan));
        // An object between two sources: `-x` makes of both what they are.
        let (path, kept) = self.made(KERNEL, &text, |from, to| {
            let linked = ["-lm".as_ref(), "-x".as_ref(), "none".as_ref(), object.as_ref(), "-xc++".as_ref()];
            // Sanitizers bring libraries that are tried with the system's own linker.
            let linker = self.linker.filter(|_| self.check == Check::Plain).map(AsRef::as_ref);
            let more: Vec<&std::ffi::OsStr> = linker.into_iter().chain(linked).collect();
            self.compile(from, to, kernel_flags, &more)
        })?;
        Ok(Program { path, folder: self.folder.clone(), kept, faulty: self.faulty })
    }
}

/// The function that the emulation calls for each thread: the kernel with its buffers, by the plan's table. A table that does not say
/// what the kernel says does not compile.
fn call(plan: &Plan) -> String {
    let mut arguments: Vec<String> = Vec::new();
    for (n, binding) in plan.buffers.iter().enumerate() {
        arguments.push(match binding.ty.strip_suffix('&') {
            Some(ty) => format!("*static_cast<{ty}*>(buffers[{n}])"),
            None => format!("static_cast<{}>(buffers[{n}])", binding.ty),
        });
    }
    for (n, (element, _)) in plan.threadgroup.iter().enumerate() {
        arguments.push(format!("static_cast<threadgroup {element}*>(tiles[{n}])"));
    }
    arguments.push("uint3{self.group[0], self.group[1], self.group[2]}".to_owned());
    arguments.extend(["self.index", "self.simdgroup", "self.lane"].map(str::to_owned));
    let (structure, size, offsets) = plan.params(1.0, None).layout();
    let mut text = format!("static_assert(sizeof({structure}) == {size}, \"\");\n");
    for (field, offset) in offsets {
        let _ = writeln!(text, "static_assert(__builtin_offsetof({structure}, {field}) == {offset}, \"\");");
    }
    let _ = writeln!(
        text,
        "void run_thread(void* const* buffers, void* const* tiles, const machine::Thread& self) {{\n    {}(\n        {});\n}}",
        plan.entry,
        arguments.join(",\n        ")
    );
    text
}

/// A compiled plan.
#[derive(Debug)]
pub struct Program {
    path: PathBuf,
    folder: PathBuf,
    kept: bool,
    faulty: bool,
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.kept {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// One dispatch.
#[derive(Clone, Copy, Debug)]
pub struct Job<'a> {
    /// What is dispatched.
    pub plan: &'a Plan,
    /// Contents of the buffers, as [`Plan::buffers`] lists them.
    pub buffers: &'a [Vec<u8>],
    /// Of the order in which threadgroups and simdgroups run.
    pub seed: u64,
}

impl Program {
    /// Runs a dispatch; the buffers that the kernel writes.
    ///
    /// # Errors
    /// What the emulation found, or how the program ended.
    pub fn run(&self, job: &Job<'_>) -> Result<Vec<(Operand, Vec<u8>)>, String> {
        let plan = job.plan;
        let mut bytes: Vec<u8> = Vec::new();
        let number = |bytes: &mut Vec<u8>, x: u64| bytes.extend(x.to_le_bytes());
        plan.grid.iter().for_each(|&n| number(&mut bytes, n.into()));
        number(&mut bytes, plan.threads.into());
        number(&mut bytes, job.seed);
        number(&mut bytes, plan.threadgroup.len() as u64);
        plan.threadgroup.iter().for_each(|(_, size)| number(&mut bytes, *size as u64));
        number(&mut bytes, job.buffers.len() as u64);
        for (binding, buffer) in plan.buffers.iter().zip(job.buffers) {
            number(&mut bytes, binding.written.into());
            number(&mut bytes, buffer.len() as u64);
            bytes.extend(buffer);
        }
        let name = unique();
        let [from, to] = ["job", "result"].map(|kind| self.folder.join(format!("{name}.{kind}")));
        std::fs::write(&from, bytes).map_err(|e| e.to_string())?;
        let ran = output(command(&self.path, self.faulty).arg(&from).arg(&to));
        let result = ran.and_then(|_| std::fs::read(&to).map_err(|e| e.to_string()));
        for path in [from, to] {
            let _ = std::fs::remove_file(path);
        }
        let result = result?;
        let mut rest = result.as_slice();
        let mut written = Vec::new();
        for (binding, buffer) in plan.buffers.iter().zip(job.buffers).filter(|(b, _)| b.written) {
            let (own, others) = rest.split_at_checked(buffer.len()).ok_or("the result is short")?;
            written.push((binding.operand.clone(), own.to_vec()));
            rest = others;
        }
        Ok(written)
    }
}
