//! `plugin:FILE`: an allocator in a shared library, as a strategy.
//!
//! What a plugin does wrong may cost the process it is loaded into, so cases with one run in a process of their own
//! (`suite::Isolation`), and [`check`] reads the file without running any of its code.

mod adapter;
mod allocator;
#[cfg(unix)]
mod apart;
mod call;
mod error;
mod last_words;
mod library;
mod noexcept;
mod reserved;
mod symbols;
mod watched;
mod wish;

pub use adapter::Plugin;
#[cfg(unix)]
pub use apart::{HostProgram, host, host_with};
pub use error::PluginError;
pub use watched::{CALL_MARK, HANG_MARK};

use std::{path::Path, time::Duration};

use self::{library::Library, symbols::Choice, wish::Wish};
use crate::strategy::{Built, Parameter, Setup, SpecError, StrategyEntry, StrategySpec};

/// The line of `list` and `--help`. It is not in the registry: there is nothing to run without a file.
pub const ENTRY: StrategyEntry = StrategyEntry {
    name: "plugin",
    summary: "any allocator's .so with PyTorch's pluggable interface: plugin:FILE[,alloc:SYMBOL,free:SYMBOL]",
    origin: "torch.cuda.memory.CUDAPluggableAllocator",
    parameters: &[
        Parameter {
            name: "alloc",
            values: "a symbol",
            default: "the first pair found of my_malloc/my_free, allocate/deallocate, alloc/free, oomph_alloc/oomph_free",
            help: "void *alloc(size_t bytes, int device, cudaStream_t stream)",
        },
        Parameter {
            name: "free",
            values: "a symbol",
            default: "the partner of alloc",
            help: "void free(void *address, size_t bytes, int device, cudaStream_t stream)",
        },
        Parameter {
            name: "record_stream",
            values: "a symbol",
            default: "oomph_record_stream, if there is one; otherwise frees wait for the other streams here",
            help: "void record_stream(void *address, cudaStream_t stream)",
        },
        Parameter {
            name: "reset",
            values: "a symbol",
            default: "oomph_reset, if there is one",
            help: "void reset(void): gives cached memory back, as empty_cache asks",
        },
        Parameter {
            name: "reserved",
            values: "a symbol",
            default: "oomph_reserved, if there is one; otherwise what a real device has lost, and unknown on a simulated one",
            help: "size_t reserved(int device): bytes that it holds now; asked after every call",
        },
        Parameter {
            name: "limit",
            values: "a symbol",
            default: "oomph_limit, if there is one; otherwise requests fail that take what is reserved, where that is known, beyond it",
            help: "void limit(int device, size_t bytes): what it may hold at most; told before the first request",
        },
        Parameter {
            name: "timeout",
            values: "a time",
            default: "30s",
            help: "a call that takes longer is a hang: its process is ended and the call named",
        },
    ],
    variants: &[],
    build: load,
};

/// Little time for a call, and still thousands of times what one takes.
const HURRY: Duration = Duration::from_millis(500);

/// Whether a strategy is a plugin.
#[must_use]
pub fn is_meant(spec: &StrategySpec) -> bool {
    spec.name == ENTRY.name
}

/// How much the device under a strategy hands out, of a strategy that may hold so much. A plugin takes nothing of that
/// device, keeps its limit itself, and reads from it what the real one has lost: there it must not be capped.
///
/// ```
/// use oomph_alloc::{plugin, strategy::StrategySpec};
/// assert_eq!(plugin::cap(&StrategySpec::from("caching"), Some(1 << 30)), Some(1 << 30));
/// assert_eq!(plugin::cap(&StrategySpec::from("plugin:my.so"), Some(1 << 30)), None);
/// ```
#[must_use]
pub fn cap(spec: &StrategySpec, limit: Option<u64>) -> Option<u64> {
    limit.filter(|_| !is_meant(spec))
}

/// Makes a strategy, whether it is a plugin or one of the registry's.
///
/// ```
/// use oomph_alloc::{plugin, strategy::{Setup, StrategySpec}};
/// let device = "sim".parse::<oomph_alloc::device::DeviceSpec>()?.open()?;
/// let setup = Setup { props: device.props(), limit: None };
/// assert!(plugin::build(&StrategySpec::from("caching"), &setup).is_ok());
/// let missing = plugin::build(&StrategySpec::from("plugin:nowhere.so"), &setup).err().unwrap();
/// assert!(missing.to_string().starts_with("strategy 'plugin': nowhere.so: "));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn build(spec: &StrategySpec, setup: &Setup<'_>) -> Built {
    if is_meant(spec) { load(&spec.parameters, setup) } else { spec.build(setup) }
}

/// The same with a plugin in another process, where [`host_with`] has named one: what it does wrong is then the answer of
/// a call. For devices whose addresses and streams are mere numbers.
pub fn build_apart(spec: &StrategySpec, setup: &Setup<'_>) -> Built {
    #[cfg(unix)]
    if let (true, Some(program)) = (is_meant(spec), apart::host_program()) {
        let wish = Wish::read(&ENTRY, &spec.parameters)?;
        let choice = choose(&wish).map_err(refuse)?;
        let plugin = apart::Apart::start(program, &spec.parameters, &wish).map_err(refuse)?;
        return Ok(Box::new(Plugin::new(Box::new(plugin), &choice, setup)));
    }
    build(spec, setup)
}

/// The same strategy; if it is a plugin, with little time for a call.
#[must_use]
pub fn hurried(spec: &StrategySpec) -> StrategySpec {
    match Wish::read(&ENTRY, &spec.parameters) {
        Ok(wish) if is_meant(spec) && wish.timeout > HURRY => {
            let parameters = format!("{},timeout:{}", spec.parameters, humantime::format_duration(HURRY));
            StrategySpec { parameters, ..spec.clone() }
        }
        _ => spec.clone(),
    }
}

/// [`StrategySpec::check`] for plugins too: the file must be there and have the symbols. None of its code runs.
pub fn check(spec: &StrategySpec) -> Result<(), SpecError> {
    if !is_meant(spec) {
        return spec.check();
    }
    let wish = Wish::read(&ENTRY, &spec.parameters)?;
    choose(&wish).map(drop).map_err(refuse)
}

fn load(parameters: &str, setup: &Setup<'_>) -> Built {
    let wish = Wish::read(&ENTRY, parameters)?;
    let choice = choose(&wish).map_err(refuse)?;
    let library = Library::open(wish.file, &choice, wish.timeout).map_err(refuse)?;
    Ok(Box::new(Plugin::new(Box::new(library), &choice, setup)))
}

fn choose(wish: &Wish<'_>) -> Result<Choice, PluginError> {
    let exported = symbols::exported(Path::new(wish.file))?;
    Choice::among(&exported, wish)
}

fn refuse(error: PluginError) -> SpecError {
    SpecError::BadParameters { strategy: ENTRY.name, reason: error.to_string() }
}
