//! `plugin:FILE`: any allocator's shared library with PyTorch's pluggable interface, as a
//! [`Strategy`](crate::strategy::Strategy). The other direction is the crate
//! `oomph-torch-allocator`.
//!
//! ```c
//! void *alloc(size_t bytes, int device, cudaStream_t stream);
//! void  free (void *address, size_t bytes, int device, cudaStream_t stream);
//! ```
//!
//! The registry cannot know a strategy that is a file: code that takes strategies from users calls
//! [`build`] and [`check`] here, which pass everything else on to the registry. A plugin may crash
//! its process, so cases with one run in a process of their own, and [`check`] reads the file
//! without running its code. This module does not know traces.

mod adapter;
#[cfg(target_os = "linux")]
mod cuda;
mod library;
#[cfg(unix)]
mod process;
mod served;
mod symbols;
mod threads;
mod watchdog;

pub use library::{CPP_LIBRARY, loaded_symbol};
#[cfg(unix)]
pub use process::{HostProgram, host, host_with};
pub use watchdog::{CALL_MARK, HANG_MARK};

use std::time::Duration;

use self::{
    adapter::PluginStrategy,
    library::PluginLibrary,
    symbols::{AllocatorSymbols, PluginError, PluginOptions},
};
use crate::device::DeviceClock;
use crate::strategy::{Built, Parameter, Setup, SpecError, StrategyEntry, StrategySpec};

/// The entry for `list` and `--help`. It is not in the registry, because a plugin needs a file.
pub const ENTRY: StrategyEntry = StrategyEntry {
    name: "plugin",
    summary: "any allocator's .so with PyTorch's pluggable interface: plugin:FILE[,alloc:SYMBOL,free:SYMBOL]",
    origin: "torch.cuda.memory.CUDAPluggableAllocator",
    differs: &[],
    parameters: &[
        Parameter::text(
            "alloc",
            "a symbol",
            "the first pair found of my_malloc/my_free, allocate/deallocate, alloc/free, oomph_alloc/oomph_free",
            "void *alloc(size_t bytes, int device, cudaStream_t stream)",
        ),
        Parameter::text(
            "free",
            "a symbol",
            "the partner of alloc",
            "void free(void *address, size_t bytes, int device, cudaStream_t stream)",
        ),
        Parameter::text(
            "record_stream",
            "a symbol",
            "oomph_record_stream, if there is one; otherwise frees wait for the other streams here",
            "void record_stream(void *address, cudaStream_t stream)",
        ),
        Parameter::text(
            "reset",
            "a symbol",
            "oomph_reset, if there is one",
            "void reset(void): gives cached memory back, as empty_cache asks",
        ),
        Parameter::text(
            "reserved",
            "a symbol",
            "oomph_reserved, if there is one; otherwise the difference in free memory on a real device, and unknown on a simulated one",
            "size_t reserved(int device): bytes that it holds now; called after every call",
        ),
        Parameter::text(
            "limit",
            "a symbol",
            "oomph_limit, if there is one; otherwise requests that exceed it fail where the reserved bytes are known",
            "void limit(int device, size_t bytes): what it may hold at most; called before the first request",
        ),
        Parameter::text(
            "timeout",
            "a time",
            "30s; 5s under `stress`",
            "a call that takes longer counts as a hang: its process is ended and the call reported",
        ),
    ],
    variants: &[],
    build: load,
};

/// A short time-out, still thousands of times longer than a call takes.
const SHORT_TIMEOUT: Duration = Duration::from_millis(500);

/// Whether a strategy is a plugin.
#[must_use]
pub fn is_plugin(spec: &StrategySpec) -> bool {
    spec.name == ENTRY.name
}

/// The cap on the device under a strategy with this limit. On a real device a plugin calls the
/// driver itself: it keeps its limit, and reads the free memory of the device, which must not be
/// capped.
///
/// ```
/// use oomph_alloc::{device::DeviceClock, plugin, strategy::StrategySpec};
/// let (caching, own) = (StrategySpec::from("caching"), StrategySpec::from("plugin:my.so"));
/// assert_eq!(plugin::cap(&caching, Some(1 << 30), DeviceClock::Wall), Some(1 << 30));
/// assert_eq!(plugin::cap(&own, Some(1 << 30), DeviceClock::Wall), None);
/// assert_eq!(plugin::cap(&own, Some(1 << 30), DeviceClock::Virtual), Some(1 << 30));
/// ```
#[must_use]
pub fn cap(spec: &StrategySpec, limit: Option<u64>, clock: DeviceClock) -> Option<u64> {
    limit.filter(|_| clock == DeviceClock::Virtual || !is_plugin(spec))
}

/// Builds a strategy: a plugin, or one of the registry.
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
    if is_plugin(spec) { load(&spec.parameters, setup) } else { spec.build(setup) }
}

/// Like [`build`], with a plugin in another process where [`host_with`] has named one: a crash is
/// then the error of a call. For devices whose addresses and streams are plain numbers.
pub fn build_apart(spec: &StrategySpec, setup: &Setup<'_>) -> Built {
    #[cfg(unix)]
    if let (true, Some(program)) = (is_plugin(spec), process::host_program()) {
        let options = PluginOptions::parse(&spec.parameters)?;
        let symbols = AllocatorSymbols::find(&options).map_err(refuse)?;
        let device = cuda::description(setup.props);
        let plugin = process::PluginProcess::start(program, &spec.parameters, &options, device).map_err(refuse)?;
        return Ok(Box::new(PluginStrategy::new(Box::new(plugin), &symbols, setup)));
    }
    build(spec, setup)
}

/// The same strategy; a plugin gets a short time-out.
#[must_use]
pub fn with_short_timeout(spec: &StrategySpec) -> StrategySpec {
    match PluginOptions::parse(&spec.parameters) {
        Ok(options) if is_plugin(spec) && options.timeout > SHORT_TIMEOUT => with_timeout(spec, SHORT_TIMEOUT),
        _ => spec.clone(),
    }
}

/// The same strategy; a plugin whose user set no time-out gets this one.
#[must_use]
pub fn with_patience(spec: &StrategySpec, timeout: Duration) -> StrategySpec {
    match PluginOptions::parse(&spec.parameters) {
        Ok(options) if is_plugin(spec) && !options.sets_timeout => with_timeout(spec, timeout),
        _ => spec.clone(),
    }
}

fn with_timeout(spec: &StrategySpec, timeout: Duration) -> StrategySpec {
    let parameters = format!("{},timeout:{}", spec.parameters, humantime::format_duration(timeout));
    StrategySpec { parameters, ..spec.clone() }
}

/// [`StrategySpec::check`] for plugins too: the file must be there and have the symbols. None of
/// its code runs.
pub fn check(spec: &StrategySpec) -> Result<(), SpecError> {
    if !is_plugin(spec) {
        return spec.check();
    }
    let options = PluginOptions::parse(&spec.parameters)?;
    AllocatorSymbols::find(&options).map(drop).map_err(refuse)
}

fn load(parameters: &str, setup: &Setup<'_>) -> Built {
    let options = PluginOptions::parse(parameters)?;
    let symbols = AllocatorSymbols::find(&options).map_err(refuse)?;
    let simulated = (setup.props.clock == DeviceClock::Virtual).then(|| cuda::description(setup.props));
    let library = PluginLibrary::open(options.file, &symbols, options.timeout, simulated.as_deref()).map_err(refuse)?;
    Ok(Box::new(PluginStrategy::new(Box::new(library), &symbols, setup)))
}

fn refuse(error: PluginError) -> SpecError {
    SpecError::BadParameters { strategy: ENTRY.name, reason: error.to_string() }
}
