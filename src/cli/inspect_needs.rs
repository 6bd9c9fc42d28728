//! What `oomph inspect` tells about memory that nobody can save: the bound, and with `--pack` the best layout found.

use std::{fmt::Write as _, time::Instant};

use serde::Serialize;

use super::failure::Failure;
use crate::{
    base::{Bytes, Nanos, Progress},
    plan::{Bound, GRAIN, Lifetimes, PackingBudget, pack},
    trace::{ProgressSource, Source},
};

/// What a source needs, whoever serves it.
#[derive(Debug, Serialize)]
pub struct Needed {
    bound: Bound,
    packing: Option<Packed>,
}

/// A layout with foresight.
#[derive(Debug, Serialize)]
struct Packed {
    packed_bytes: u64,
    over_bound_percent: f64,
    /// No layout is lower than this.
    proven_bytes: u64,
    is_optimal: bool,
    method: String,
    blocks: usize,
    /// By this machine's clock.
    wall_ns: u64,
}

impl Needed {
    /// What no allocator that serves whole grains can do without.
    pub fn bound_bytes(&self) -> u64 {
        self.bound.rounded_bytes
    }

    /// Reads the source once, and once more for a layout.
    pub fn of(source: &dyn Source, with_packing: bool, progress: &dyn Progress) -> Result<Needed, Failure> {
        let once = |stage: &str| ProgressSource::stage(source, progress, stage, 1);
        let bound = Bound::of(&once("finding the bound"), GRAIN).map_err(Failure::usage)?;
        let packing = if with_packing { Some(packed(&once("collecting blocks"), progress)?) } else { None };
        Ok(Needed { bound, packing })
    }
}

fn packed(source: &dyn Source, progress: &dyn Progress) -> Result<Packed, Failure> {
    let lifetimes = Lifetimes::read(source, GRAIN).map_err(Failure::usage)?;
    progress.begin_stage("laying blocks out", 0);
    let began = Instant::now();
    let packing = pack(&lifetimes, PackingBudget::THOROUGH);
    let wall_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Ok(Packed {
        packed_bytes: packing.height_bytes,
        over_bound_percent: packing.over_bound() * 100.0,
        proven_bytes: packing.proven_bytes,
        is_optimal: packing.is_optimal(),
        method: packing.method.to_string(),
        blocks: lifetimes.blocks().len(),
        wall_ns,
    })
}

/// The lines for people.
pub fn text(needed: &Needed) -> String {
    let mut out = String::new();
    let mut line = |label: &str, value: String| {
        let _ = writeln!(out, "{label:<12} {value}");
    };
    let Bound { requested_bytes, rounded_bytes } = needed.bound;
    line(
        "bound",
        format!(
            "{}: no allocator can do with less; {} in whole {GRAIN} B",
            Bytes(requested_bytes),
            Bytes(rounded_bytes)
        ),
    );
    if let Some(packing) = &needed.packing {
        let verdict = if packing.is_optimal {
            "no layout is lower".to_owned()
        } else {
            format!("none below {} is possible", Bytes(packing.proven_bytes))
        };
        let Packed { packed_bytes, over_bound_percent, method, blocks, wall_ns, .. } = packing;
        line(
            "packed",
            format!(
                "{}, {over_bound_percent:.2} % over the bound, by {method} of {blocks} blocks in {}; {verdict}",
                Bytes(*packed_bytes),
                Nanos(*wall_ns),
            ),
        );
    }
    out
}
