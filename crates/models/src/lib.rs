//! Workload generators, and the recipes (TOML files) that set their parameters.
//!
//! A [`Recipe`] names a generator and sets its parameters. It becomes a [`Workload`], which is a
//! [`Source`](oomph_trace::Source) like any recording. A workload knows neither strategy nor device: its events do not
//! depend on who replays them.
//!
//! `synthetic` has patterns that follow a rule; `autograd` has models that allocate as PyTorch does.
//!
//! ```
//! use oomph_models::Recipe;
//! use oomph_trace::Source;
//! let workload = Recipe::named("checkerboard")?.with("rounds", "2").seed(7).workload()?;
//! assert_eq!(workload.name(), "checkerboard[rounds=2]");
//! # Ok::<(), oomph_models::WorkloadError>(())
//! ```

mod autograd;
mod config;
mod generator;
mod parameter;
mod random;
mod recipe;
mod synthetic;
mod workload;

pub use autograd::{NumericEffect, OPTIMIZER_WORDS};
pub use generator::{GENERATORS, Generator, GeneratorEntry, GeneratorStart, WeightCounter};
pub use parameter::{GivenValue, Parameter, ParameterValues, Parameters, SettingPlace, WorkloadError};
pub use random::{PowerLaw, SeededRandom};
pub use recipe::{Recipe, all_recipes, is_recipe_name, recipe_names};
pub use workload::Workload;
