//! Training programs that hold on to memory, each beside the program that does not.
//!
//! A [`TrainingFault`] is a common mistake, with the remedies that people try: some help, some do not, and some faults
//! turn out to be harmless. The programs call the parts of the [`Trainer`], so the cost of a fault follows from what it
//! holds. Thirteen recordings of PyTorch 2.11 confirm them, action by action
//! (`tests/integration/transformer_truth/faults.rs`). A new fault is one constant and one line in [`FAULTS`].

mod graphs;
mod inputs;

use std::sync::Arc;

use super::{
    backward::RetainGraph,
    graph::Tensor,
    machine::{ForwardResult, TrainingBatch},
    models::transformer::Transformer,
    plan::{self, SequenceLengths, TrainingPlan},
    techniques,
    trainer::{ForwardOutput, GradientMode, Trainer},
};
use crate::{GeneratorEntry, Parameter, Parameters, SeededRandom, WorkloadError, generator::in_parts};
use oomph_base::{GIB, Work};
use oomph_trace::{Category, MarkKind, TraceBuilder};

/// Every fault, in the order in which `list` shows them.
const FAULTS: &[TrainingFault] = &[
    graphs::OUTPUTS,
    graphs::LOSS_GRAPH,
    graphs::LOSS_SUM,
    graphs::INTERMEDIATES,
    graphs::RETAIN_GRAPH,
    graphs::RETAIN_TWICE,
    graphs::NO_ZERO_GRAD,
    graphs::CYCLE,
    graphs::VALIDATION_GRAPH,
    graphs::VALIDATION_OUTPUTS,
    inputs::CACHE,
    inputs::SLOW_LEAK,
    inputs::PINNED_LOADER,
    inputs::PREFETCHED_BATCHES,
    inputs::DUPLICATED_BATCHES,
    inputs::CHURN,
    graphs::DANGLING,
    inputs::LOADED_TWICE,
];

const FAULT: Parameter = Parameter::choice("fault", &NAMES, "outputs", "what the program does wrong");
/// The registry entry of training with faults.
pub(crate) const FAULTY_TRAINING: GeneratorEntry = GeneratorEntry {
    name: "faulty_training",
    summary: "training programs that hold on to memory, with and without a remedy",
    seeded: true,
    parameters: &[
        FAULT,
        Parameter::text(
            "remedy",
            "one of none, detach, cpu, consume, item, clear, rebind, release, zero_grad, before_forward, before_backward, \
             weak_reference, break_link, collect, no_grad, bounded, pageable, on_demand, one_copy, batched, del, gc, \
             empty_cache, del_gc, del_empty_cache, gc_empty_cache, del_gc_empty_cache",
            "none",
            "the remedy; each fault has its own",
        ),
        plan::STEPS,
        Parameter::size(
            "kept_bytes",
            1..=64 * GIB,
            "64MiB",
            "bytes of a cycle, of an entry of a cache, or of a leak of preprocessing",
        ),
        Parameter::count("entries", 1..=1 << 20, "4", "entries of a cache that is bounded"),
        Parameter::count("epoch_steps", 1..=1 << 20, "1", "steps per epoch, for slow_leak"),
        Parameter::count("workers", 0..=16, "4", "processes that load batches"),
        Parameter::size("input_bytes", 1..=64 * GIB, "64MiB", "bytes of a batch beside its tokens, such as images"),
        Parameter::count("batches", 1..=1 << 10, "4", "batches that are prefetched, or copies that are made of one"),
        Parameter::count("tensors", 1..=1 << 20, "2000", "small tensors per step, for churn"),
        plan::LAYERS,
        plan::WIDTH,
        plan::HEADS,
        plan::VOCABULARY,
        plan::CONTEXT,
        plan::BATCH,
        plan::MIN_LENGTH,
        plan::LENGTHS,
        plan::EXPERTS,
        plan::CHOSEN_EXPERTS,
        plan::IMBALANCE,
        techniques::PRECISION,
        techniques::OPTIMIZER,
        techniques::TECHNIQUES,
    ],
    build: |parameters| {
        let (plan, steps) = (TrainingPlan::read(parameters)?, parameters.count(plan::STEPS.name)?);
        plan.refuse_libraries().map_err(|reason| parameters.refuse(reason))?;
        plan.refuse_fully_shard()
            .and_then(|()| plan.refuse_split_sequences("for programs with faults"))
            .map_err(|reason| parameters.refuse(reason))?;
        if plan.techniques.micro_batches > 1 || plan.techniques.pipeline_stages > 1 {
            let reason = "a program with a fault does not divide its batches: accum and pipeline do not apply";
            return Err(parameters.refuse(reason));
        }
        let lengths = SequenceLengths::read(plan.shape, parameters)?;
        let settings = FaultSettings {
            kept_bytes: parameters.size("kept_bytes")?,
            entries: parameters.count("entries")?,
            epoch_steps: parameters.count("epoch_steps")?,
            workers: parameters.count("workers")?,
            input_bytes: parameters.size("input_bytes")?,
            batches: parameters.count("batches")?,
            tensors: parameters.count("tensors")?,
        };
        let build = chosen_program(parameters)?;
        let model = Arc::new(Transformer::new(&plan));
        Ok(in_parts(steps.into(), move |mut random| {
            let mut trainer = Trainer::new(plan.clone(), model.clone(), random.clone());
            let (lengths, mut program) = (lengths.clone(), build(&settings));
            move |step, trace: &mut TraceBuilder| {
                let length = lengths.of_step(step, &mut random);
                trainer.write(trace, |trainer| {
                    if step == 0 {
                        (program.load)(trainer);
                    }
                    trainer.mark(MarkKind::Step, "step", step);
                    (program.step)(trainer, &mut FaultStep { step, length, random: &mut random });
                    trainer.end_step(step);
                });
            }
        }))
    },
    count_weights: None,
};

/// A mistake and its remedies.
struct TrainingFault {
    name: &'static str,
    /// The program under each remedy; `none` is the mistake itself.
    programs: &'static [(&'static str, BuildProgram)],
}

type BuildProgram = fn(&FaultSettings) -> FaultProgram;
type StepCallback = Box<dyn FnMut(&mut Trainer, &mut FaultStep<'_>) + Send>;

/// A program's loop.
struct FaultProgram {
    /// Called before the first step.
    load: fn(&mut Trainer),
    /// Called in every step, after its mark and before [`Trainer::end_step`].
    step: StepCallback,
}

impl FaultProgram {
    /// A program that loads the model and then repeats this step.
    fn new(step: impl FnMut(&mut Trainer, &mut FaultStep<'_>) + Send + 'static) -> FaultProgram {
        FaultProgram { load: |trainer| trainer.machine.load(), step: Box::new(step) }
    }

    /// Plain training.
    fn plain() -> FaultProgram {
        FaultProgram::new(|trainer, step| trainer.train(step, |_, _| {}))
    }

    /// Plain training with `between` after every forward phase.
    fn training(mut between: impl FnMut(&mut Trainer, &FaultStep<'_>, TrainingBatch) + Send + 'static) -> FaultProgram {
        FaultProgram::new(move |trainer, step| trainer.train(step, |trainer, batch| between(trainer, step, batch)))
    }
}

/// One step of a program's loop.
struct FaultStep<'a> {
    step: u32,
    /// Tokens per sequence.
    length: u32,
    random: &'a mut SeededRandom,
}

/// What programs read besides the model.
#[derive(Clone, Copy, Debug)]
struct FaultSettings {
    kept_bytes: u64,
    entries: u32,
    epoch_steps: u32,
    workers: u32,
    input_bytes: u64,
    batches: u32,
    tensors: u32,
}

const NAMES: [&str; FAULTS.len()] = {
    let mut names = [""; FAULTS.len()];
    let mut place = 0;
    while place < FAULTS.len() {
        names[place] = FAULTS[place].name;
        place += 1;
    }
    names
};

fn chosen_program(parameters: &Parameters<'_>) -> Result<BuildProgram, WorkloadError> {
    let (name, remedy) = (parameters.choice(FAULT.name)?, parameters.text("remedy")?);
    let programs = FAULTS.iter().find(|fault| fault.name == name).map_or(&[][..], |fault| fault.programs);
    programs.iter().find(|(word, _)| *word == remedy).map(|(_, build)| *build).ok_or_else(|| {
        let words: Vec<&str> = programs.iter().map(|(word, _)| *word).collect();
        parameters.refuse(format!("fault '{name}' has no remedy '{remedy}'; its remedies are {}", words.join(", ")))
    })
}

/// The program holds this until it ends: it is never released.
fn keep_forever<T>(_held: T) {}

/// What these programs do beside plain training.
impl Trainer {
    /// A plain training step, with `between` after its forward phase.
    fn train(&mut self, step: &FaultStep<'_>, between: impl FnOnce(&mut Trainer, TrainingBatch)) {
        let (batch, loss) = self.run_forward(step.step, step.length);
        between(self, batch);
        self.run_backward(step.step, loss, RetainGraph::No);
        self.update_and_zero(step);
    }

    /// The optimizer's phase and `zero_grad`.
    fn update_and_zero(&mut self, step: &FaultStep<'_>) {
        self.update(step.step);
        self.machine.zero_gradients();
    }

    /// The logits of a batch.
    fn evaluate(&mut self, step: &FaultStep<'_>, batch: TrainingBatch, mode: GradientMode) -> ForwardOutput {
        self.mark(MarkKind::Phase, "evaluate", step.step);
        let output = self.forward(batch, mode, ForwardResult::Logits);
        self.machine.end_autocast();
        output
    }

    /// Copies the most likely token of every row to the host and releases the logits.
    fn consume(&mut self, output: ForwardOutput) {
        let rows = u64::from(output.graph.sequences) * u64::from(output.graph.length);
        let tokens = self.machine.temporary(8 * rows);
        let bytes = self.machine.bytes(output.value.tensor);
        self.machine.work(Work::Reduction { bytes }, [output.value.tensor, tokens]);
        self.drop_output(output);
        self.move_to_host(tokens);
    }

    /// Copies a tensor to pageable host memory and releases it.
    fn move_to_host(&mut self, tensor: Tensor) {
        let bytes = self.machine.bytes(tensor);
        self.machine.work(Work::CopyOut { bytes, pinned: false }, [tensor]);
        self.machine.release(tensor);
    }

    /// A tensor that is computed from another one.
    fn derive(&mut self, source: Tensor, bytes: u64, category: Category) -> Tensor {
        let derived = self.machine.alloc(bytes, category);
        let traffic = bytes + self.machine.bytes(source).min(bytes);
        self.machine.elementwise(traffic, [source, derived]);
        derived
    }

    /// Binds a program's variable: the tensor that it held before is released.
    fn rebind(&mut self, variable: &mut Option<Tensor>, tensor: Tensor) {
        if let Some(before) = variable.replace(tensor) {
            self.machine.release(before);
        }
    }

    /// The same for an output with its graph.
    fn rebind_output(&mut self, variable: &mut Option<ForwardOutput>, output: Option<ForwardOutput>) {
        if let Some(before) = std::mem::replace(variable, output) {
            self.drop_output(before);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;
    use crate::{ParameterValues, Recipe, recipe_names};
    use oomph_base::MIB;
    use oomph_trace::{Category, Op, OpKind, Trace, TraceSummary, check};

    const LOGITS: u64 = 2 * 1024 * 50257 * 4;

    fn recipe(name: &str) -> Recipe {
        Recipe::named(name).unwrap()
    }

    fn summary(name: &str) -> TraceSummary {
        check(&recipe(name).workload().unwrap()).unwrap()
    }

    /// Bytes on the device after every step.
    fn levels(recipe: &Recipe) -> Vec<u64> {
        let trace = Trace::read(&recipe.workload().unwrap()).unwrap();
        let (mut live, mut sizes, mut levels) = (0, BTreeMap::new(), Vec::new());
        for event in &trace.events {
            match event.op {
                Op::Alloc { slot, bytes, .. } => {
                    sizes.insert(slot, bytes);
                    live += bytes;
                }
                Op::Free { slot, .. } => live -= sizes.remove(&slot).unwrap(),
                Op::Mark { kind: MarkKind::Step, index: 1.., .. } => levels.push(live),
                _ => {}
            }
        }
        levels.push(live);
        levels
    }

    /// What every step adds, if all of the last ones add the same.
    fn growth(name: &str) -> Option<u64> {
        let levels = levels(&recipe(name));
        let warm = &levels[levels.len().saturating_sub(7)..];
        let growth = warm[1].checked_sub(warm[0])?;
        warm.windows(2).all(|pair| pair[1].checked_sub(pair[0]) == Some(growth)).then_some(growth)
    }

    #[test]
    fn fixed_workloads_are_level() {
        let fixed: Vec<&str> = recipe_names().filter(|name| name.ends_with("-fixed")).collect();
        assert!(fixed.len() >= 20, "{fixed:?}");
        for name in fixed {
            let levels = levels(&recipe(name));
            let warm = &levels[5.min(levels.len() - 2)..];
            assert!(warm.iter().all(|level| *level == warm[0]), "{name}: {levels:?}");
            let faulty = name.trim_end_matches("-fixed").trim_end_matches("-broken").trim_end_matches("-collected");
            let faulty = faulty.trim_end_matches("-cpu");
            assert!(recipe_names().any(|other| other == faulty), "{name} has no faulty twin");
        }
    }

    /// The sizes of all requests of every step, sorted; what comes before the first step is its own entry.
    fn requests(name: &str) -> Vec<Vec<u64>> {
        let trace = Trace::read(&recipe(name).workload().unwrap()).unwrap();
        let mut steps = vec![Vec::new()];
        for event in &trace.events {
            match event.op {
                Op::Alloc { bytes, .. } => steps.last_mut().unwrap().push(bytes),
                Op::Mark { kind: MarkKind::Step, .. } => steps.push(Vec::new()),
                _ => {}
            }
        }
        steps.iter_mut().for_each(|sizes| sizes.sort_unstable());
        steps
    }

    /// What is left of sorted `sizes` without those of `others`.
    fn without(sizes: &[u64], others: &[u64]) -> Vec<u64> {
        let mut others = others.iter().peekable();
        sizes
            .iter()
            .copied()
            .filter(|size| {
                while others.next_if(|other| *other < size).is_some() {}
                others.next_if_eq(&size).is_none()
            })
            .collect()
    }

    /// Programs with a fault, the same program with a remedy, and what only one of them requests in a step.
    const TWINS: [(&str, &str, &[u64], &[u64]); 16] = [
        ("leak-cache", "leak-cache-fixed", &[], &[]),
        ("leak-cache", "leak-cache-cpu-fixed", &[], &[]),
        ("leak-cycle", "leak-cycle-fixed", &[], &[]),
        ("leak-cycle", "leak-cycle-broken-fixed", &[], &[]),
        ("leak-cycle", "leak-cycle-collected-fixed", &[], &[]),
        ("leak-intermediates", "leak-intermediates-fixed", &[], &[]),
        // The sum of losses is a tensor.
        ("leak-loss-graph", "leak-loss-graph-fixed", &[4], &[]),
        ("leak-loss-sum", "leak-loss-sum-fixed", &[4], &[]),
        ("leak-no-zero-grad", "leak-no-zero-grad-fixed", &[], &[]),
        // The most likely token of every row, and a copy of the logits.
        ("leak-outputs", "leak-outputs-fixed", &[], &[8 * 2 * 1024]),
        ("leak-outputs", "leak-outputs-detached", &[], &[LOGITS]),
        ("leak-outputs", "leak-outputs-cpu", &[], &[]),
        ("leak-retain-graph", "leak-retain-graph-fixed", &[], &[]),
        ("leak-retain-graph", "leak-retain-rebound", &[], &[]),
        ("leak-retain-twice", "leak-retain-twice-fixed", &[], &[]),
        ("leak-slow", "leak-slow-fixed", &[], &[]),
    ];

    #[test]
    fn twins_are_the_same_program_but_for_the_fault() {
        for name in recipe_names().filter(|name| name.starts_with("leak-")) {
            assert!(TWINS.iter().any(|twins| twins.0 == name || twins.1 == name), "{name} has no twin");
        }
        for (faulty, fixed, of_fault, of_remedy) in TWINS {
            let (of_faulty, of_fixed) = (requests(faulty), requests(fixed));
            assert_eq!(of_faulty.len(), of_fixed.len(), "{faulty} and {fixed} have as many steps");
            for (step, (one, other)) in of_faulty.iter().zip(&of_fixed).enumerate() {
                let (only_one, only_other) = (without(one, other), without(other, one));
                let is_allowed = |only: &[u64], allowed: &[u64]| only.is_empty() || only == allowed;
                assert!(is_allowed(&only_one, of_fault), "{faulty}, step {step}: {only_one:?}");
                assert!(is_allowed(&only_other, of_remedy), "{fixed}, step {step}: {only_other:?}");
            }
        }
    }

    /// As PyTorch 2.11 has it: 512 bytes in all, and no more with every step.
    #[test]
    fn summed_loss_with_backward_is_level() {
        let (summed, fixed) = (levels(&recipe("leak-loss-sum")), levels(&recipe("leak-loss-sum-fixed")));
        assert!(summed.iter().zip(&fixed).all(|(with, without)| *with == without + 4), "{summed:?} {fixed:?}");
        assert!(summed[1..].iter().all(|level| *level == summed[1]), "{summed:?}");
        // Without backward, every step holds its graph.
        let without_backward = growth("leak-loss-graph").unwrap();
        assert!(without_backward > 1 << 30, "{without_backward}");
    }

    #[test]
    fn faults_grow_by_what_they_hold() {
        for (name, bytes) in [
            ("leak-outputs-detached", LOGITS),
            ("leak-intermediates", LOGITS),
            ("val-keep-no-grad", LOGITS),
            ("leak-cache", 64 * MIB),
            ("leak-slow", 2700 << 10),
            ("leak-outputs-cpu", 0),
            ("leak-retain-rebound", 0),
            ("leak-retain-twice", 0),
            ("leak-no-zero-grad", 0),
            ("leak-loss-sum", 0),
            ("val-with-grad", 0),
            ("loader-pinned", 0),
            ("loader-prefetched", 0),
            ("loader-duplicated", 0),
            ("churn", 0),
            ("load-twice", 0),
        ] {
            assert_eq!(growth(name), Some(bytes), "{name}");
        }
        for name in ["leak-outputs", "leak-loss-graph", "leak-retain-graph", "val-keep-outputs"] {
            let growth = growth(name).unwrap();
            assert!((1_331_000_000..1_333_000_000).contains(&growth), "{name}: {growth}");
        }
    }

    #[test]
    fn slow_leak_adds_15_to_20_percent() {
        let levels = levels(&recipe("leak-slow"));
        assert_eq!(levels.len(), 100);
        let grown = levels[99] as f64 / levels[0] as f64 - 1.0;
        assert!((0.15..0.20).contains(&grown), "{grown}");
    }

    #[test]
    fn cycles_pile_up_and_are_collected() {
        let piled = levels(&recipe("leak-cycle"));
        let base = piled.iter().min().unwrap();
        let above: Vec<u64> = piled.iter().map(|level| (level - base) / (64 * MIB)).collect();
        assert_eq!(above[..13], [0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]);
        // The technique collects as the remedy does.
        let collected = levels(&recipe("leak-cycle").with("techniques", "gc"));
        assert!(collected.iter().all(|level| level == base));
    }

    #[test]
    fn names_and_cycles_hold_dangling_tensors() {
        let last = |name| *levels(&recipe(name)).last().unwrap();
        let base = last("dangling-fixed");
        // Twelve reports; in between the collector came by itself.
        let garbage = last("dangling-del") - base;
        assert_eq!(garbage % (64 * MIB), 0);
        assert!((MIB..6 * 64 * MIB).contains(&garbage), "{garbage}");
        let logits_and_report = last("dangling-gc") - base;
        assert!(logits_and_report > LOGITS + 64 * MIB, "{logits_and_report}");
        assert!(last("dangling") > last("dangling-gc"));
        for (with, without) in [
            ("dangling-empty-cache", "dangling"),
            ("dangling-del-empty-cache", "dangling-del"),
            ("dangling-gc-empty-cache", "dangling-gc"),
            ("dangling-fixed", "dangling-del-gc"),
        ] {
            assert_eq!(last(with), last(without), "emptying the cache frees no tensor");
            assert_eq!((summary(with).count(OpKind::EmptyCache), summary(without).count(OpKind::EmptyCache)), (12, 0));
        }
    }

    #[test]
    fn workers_take_pinned_memory_only() {
        let of = |workers: &str| check(&recipe("loader-pinned").with("workers", workers).workload().unwrap()).unwrap();
        for (workers, buffers) in [("0", 1), ("1", 2), ("4", 8), ("16", 32)] {
            assert_eq!(of(workers).count(OpKind::HostAlloc), buffers);
            assert_eq!(of(workers).peak.bytes, of("0").peak.bytes);
        }
        assert_eq!(summary("loader-pinned-fixed").count(OpKind::HostAlloc), 0);
    }

    #[test]
    fn batches_on_the_device_raise_the_peak() {
        let peak = |name| summary(name).peak.bytes;
        assert_eq!(peak("loader-prefetched") - peak("loader-prefetched-fixed"), 8 * 256 * MIB);
        assert_eq!(peak("loader-duplicated") - peak("loader-duplicated-fixed"), 4 * 256 * MIB);
    }

    #[test]
    fn loaded_dictionary_holds_the_weights_twice() {
        let last = |name| *levels(&recipe(name)).last().unwrap();
        let weights = last("load-twice") - last("load-twice-fixed");
        let deleted = *levels(&recipe("load-twice").with("remedy", "del")).last().unwrap();
        assert_eq!(deleted, last("load-twice-fixed"));
        // 124 million numbers, and the head that is not tied.
        assert_eq!(weights / 4, 163_037_184);
    }

    #[test]
    fn churn_is_freed_within_its_step() {
        let (faulty, fixed) = (summary("churn"), summary("churn-fixed"));
        assert_eq!(faulty.count(OpKind::Alloc) - fixed.count(OpKind::Alloc), 12 * 1499);
        assert_eq!(faulty.live_bytes, fixed.live_bytes);
    }

    #[test]
    fn every_block_has_a_category() {
        for name in recipe_names().filter(|name| recipe(name).generator.name == FAULTY_TRAINING.name) {
            let trace = Trace::read(&recipe(name).with("steps", "2").workload().unwrap()).unwrap();
            let categories: BTreeSet<Category> = trace.tables.tags().iter().map(|tag| tag.category).collect();
            let unknown = trace.events.iter().filter(|event| {
                matches!(event.op, Op::Alloc { tag, .. } if trace.tables.tags()[tag.index()].category == Category::Unknown)
            });
            assert_eq!(unknown.count(), 0, "{name}");
            assert!(categories.contains(&Category::Parameter) && categories.contains(&Category::Input), "{name}");
        }
    }

    #[test]
    fn remedy_of_another_fault_is_refused() {
        let error = |recipe: Recipe| recipe.workload().err().unwrap().to_string();
        assert_eq!(
            error(recipe("leak-outputs").with("remedy", "no_grad")),
            "workload 'leak-outputs': fault 'outputs' has no remedy 'no_grad'; its remedies are none, detach, cpu, consume"
        );
        assert_eq!(
            error(recipe("leak-outputs").with("techniques", "accum2")),
            "workload 'leak-outputs': a program with a fault does not divide its batches: accum and pipeline do not apply"
        );
    }

    #[test]
    fn remedies_are_declared() {
        let declared = FAULTY_TRAINING.parameters.iter().find(|parameter| parameter.name == "remedy").unwrap();
        let ParameterValues::Text(declared) = declared.values else { panic!("a text") };
        let declared: BTreeSet<&str> = declared.trim_start_matches("one of ").split(", ").collect();
        let used: BTreeSet<&str> = FAULTS.iter().flat_map(|fault| fault.programs).map(|(word, _)| *word).collect();
        assert_eq!(declared, used);
        assert!(FAULTS.iter().all(|fault| fault.programs[0].0 == "none"));
    }

    /// With a loss scale, the tensor at which backward begins is not the loss that the program adds up.
    #[test]
    fn scaled_losses_can_be_added_up() {
        let recipe = recipe("leak-loss-sum").with("techniques", "fp16").with("steps", "3");
        assert_eq!(check(&recipe.workload().unwrap()).unwrap().steps, 3);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// With any fault and technique, tensors are freed once and not used after.
        #[test]
        fn any_fault_works_with_any_technique(
            (fault, remedy) in prop::sample::select(FAULTS.iter().flat_map(|fault| {
                fault.programs.iter().map(|(remedy, _)| (fault.name, *remedy))
            }).collect::<Vec<_>>()),
            words in prop::sample::subsequence(vec![
                "amp", "fp16", "bf16_model", "ckpt", "offload", "offload_optimizer", "offload_params",
                "offload_component", "inplace", "zero_fill", "empty_cache", "gc", "sgd", "chunked_loss", "lora", "ddp",
                "zero2:2", "zero3:2", "tensor_parallel:2",
            ], 0..4),
            min_length in prop::sample::select(vec!["0", "8"]),
        ) {
            let small = [
                ("layers", "2"), ("width", "64"), ("heads", "2"), ("vocab", "500"), ("context", "32"), ("steps", "6"),
                ("tensors", "50"), ("kept_bytes", "1MiB"), ("input_bytes", "1MiB"),
            ];
            let recipe = small.iter().fold(recipe("leak-outputs"), |recipe, (key, text)| recipe.with(key, text));
            let recipe = recipe.with("fault", fault).with("remedy", remedy).with("min_length", min_length);
            match recipe.with("techniques", &words.join(",")).workload() {
                Err(error) => prop_assert!(error.to_string().contains("contradict"), "{words:?}: {error}"),
                Ok(workload) => prop_assert_eq!(check(&workload).unwrap().steps, 6),
            }
        }
    }
}
