//! What produces a trace: generators, and the recipes (TOML) that give them parameters.
//!
//! A [`Recipe`] names a generator and sets its parameters; it becomes a [`Workload`], which is a
//! [`Source`](oomph_trace::Source) like any recording. The suite and the command line come here by name.
//! A workload knows no strategy and no device: it may not adapt to who runs it.
//!
//! ```
//! use oomph_models::Recipe;
//! use oomph_trace::Source;
//! let workload = Recipe::named("checkerboard")?.with("rounds", "2").seed(7).workload()?;
//! assert_eq!(workload.name(), "checkerboard[rounds=2]");
//! # Ok::<(), oomph_models::WorkloadError>(())
//! ```

mod autograd;
mod error;
mod generator;
mod parameter;
mod random;
mod recipe;
mod synthetic;
mod workload;

pub use error::{Place, Problem, WorkloadError};
pub use generator::{GENERATORS, Generator, GeneratorEntry, GeneratorStart};
pub use parameter::{Given, Parameter, ParameterValues, Parameters};
pub use random::{PowerLaw, SeededRandom};
pub use recipe::{Recipe, all_recipes, is_recipe_name, recipe_names};
pub use workload::Workload;
