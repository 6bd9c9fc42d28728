//! Random programs against a naive oracle, for every registered strategy and variant.
//!
//! The oracle is a list of the blocks that the program holds. After every step, all invariants are
//! computed from it anew. A failing program is shrunk to the shortest one that still fails.
//! `PROPTEST_CASES` sets the number of programs per strategy.

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};
use proptest_state_machine::{ReferenceStateMachine, StateMachineTest};

use super::{
    ALIGNMENT, Block, BlockState, STRATEGIES, Setup, Strategy as _, StrategySpec,
    conformance::{ConformanceProgram, ConformanceSubject, ProgramStep, StepOutcome},
    test_device::simulated,
};
use crate::device::{
    CallKind, Device,
    wrap::{CallFailure, FaultPlan, FaultyDevice},
};
use oomph_base::{KIB, MIB, Nanos, StreamId};

/// The default number of programs per strategy and variant.
const CASES: u32 = 64;

/// The reference state: how the program runs, and how many blocks it has requested and not freed.
#[derive(Clone, Debug)]
struct Program {
    spec: StrategySpec,
    capacity: u64,
    /// Driver calls that fail, by kind and turn; fewer than the number of retries.
    faults: Vec<(CallKind, u64)>,
    outstanding: usize,
}

impl ReferenceStateMachine for Program {
    type State = Program;
    type Transition = ProgramStep;

    fn init_state() -> BoxedStrategy<Program> {
        let unnamed = StrategySpec { name: String::new(), parameters: String::new() };
        let faults = prop::collection::vec((prop::sample::select(&CallKind::ALL[..]), 1..16u64), 0..4);
        (8..128u64, faults)
            .prop_map(move |(mib, faults)| {
                let capacity = mib * MIB;
                Program { spec: unnamed.clone(), capacity, faults, outstanding: 0 }
            })
            .boxed()
    }

    fn transitions(program: &Program) -> BoxedStrategy<ProgramStep> {
        let stream = (0..ConformanceProgram::STREAMS).prop_map(StreamId);
        let bytes = prop_oneof![1..4 * KIB, 1..MIB + 1, MIB..12 * MIB, 8 * MIB..40 * MIB];
        let alloc = (bytes, stream.clone()).prop_map(|(bytes, stream)| ProgramStep::Alloc { bytes, stream });
        let nth = 0..program.outstanding.max(1);
        let nanos = (1_000..3_000_000u64).prop_map(Nanos);
        let with_block = u32::from(program.outstanding > 0);
        prop_oneof![
            10 => alloc,
            8 * with_block => nth.clone().prop_map(|nth| ProgramStep::Free { nth }),
            3 * with_block => (nth, stream.clone()).prop_map(|(nth, stream)| ProgramStep::UsedOn { nth, stream }),
            3 => (stream.clone(), nanos).prop_map(|(stream, nanos)| ProgramStep::Work { stream, nanos }),
            1 => stream.prop_map(|stream| ProgramStep::StreamSync { stream }),
            1 => Just(ProgramStep::DeviceSync),
            1 => Just(ProgramStep::Trim),
            2 => Just(ProgramStep::NextStep),
        ]
        .boxed()
    }

    fn preconditions(program: &Program, step: &ProgramStep) -> bool {
        match *step {
            ProgramStep::Free { nth } | ProgramStep::UsedOn { nth, .. } => nth < program.outstanding,
            _ => true,
        }
    }

    fn apply(mut program: Program, step: &ProgramStep) -> Program {
        match step {
            ProgramStep::Alloc { .. } => program.outstanding += 1,
            ProgramStep::Free { .. } => program.outstanding -= 1,
            _ => {}
        }
        program
    }
}

/// A strategy under test, and the oracle.
struct Witness {
    bench: ConformanceProgram,
    /// The blocks that the program holds, with their requested sizes. Failed requests are missing,
    /// so places are taken modulo the length, as `ConformanceProgram` does.
    held: Vec<(Block, u64)>,
}

impl StateMachineTest for Witness {
    type SystemUnderTest = Witness;
    type Reference = Program;

    fn init_test(program: &Program) -> Witness {
        let faulty = |bytes| -> Box<dyn Device> {
            let plan = program
                .faults
                .iter()
                .fold(FaultPlan::none(), |plan, &(kind, turn)| plan.fail_nth(Some(kind), turn, CallFailure::UNKNOWN));
            Box::new(FaultyDevice::with(plan, simulated(bytes)))
        };
        let subject =
            ConformanceSubject { build: &|props| program.spec.build(&Setup { props, limit: None }), device: &faulty };
        Witness { bench: ConformanceProgram::new(&subject, program.capacity).unwrap(), held: Vec::new() }
    }

    fn apply(mut witness: Witness, _: &Program, step: ProgramStep) -> Witness {
        let echo = witness.bench.step(&step);
        match (step, echo) {
            (ProgramStep::Alloc { bytes, .. }, StepOutcome::Served(block, _)) => witness.held.push((block, bytes)),
            (ProgramStep::Free { nth }, StepOutcome::Freed(_)) => {
                let place = nth % witness.held.len();
                witness.held.remove(place);
            }
            (step, StepOutcome::Failed(error)) => panic!("{step:?}: {error}"),
            _ => {}
        }
        witness
    }

    fn check_invariants(Witness { bench, held }: &Witness, program: &Program) {
        let stats = bench.watch.strategy.stats();
        for (number, (block, requested)) in held.iter().enumerate() {
            assert_eq!(block.address.0 % ALIGNMENT, 0, "{block:?}");
            assert!(block.size >= *requested, "{block:?} for {requested} bytes");
            for (other, _) in &held[..number] {
                let apart = block.address.offset(block.size) <= other.address
                    || other.address.offset(other.size) <= block.address;
                assert!(apart, "{block:?} and {other:?} overlap");
            }
        }
        assert_eq!(stats.live_blocks, held.len() as u64);
        assert_eq!(stats.current.allocated, held.iter().map(|(block, _)| block.size).sum::<u64>());
        assert!(stats.current.requested >= held.iter().map(|(_, requested)| requested).sum::<u64>());
        assert!(stats.current.allocated <= stats.current.active && stats.current.active <= stats.current.reserved);
        if stats.segments > 0 {
            assert!(stats.current.reserved <= bench.watch.device.held_bytes());
            assert!(bench.watch.device.held_bytes() <= program.capacity);
        }
        if let Some(layout) = bench.watch.strategy.layout() {
            let real = || layout.segments.iter().filter(|segment| !segment.alias);
            assert_eq!(real().map(|segment| segment.bytes).sum::<u64>(), stats.current.reserved);
            for segment in real() {
                assert_eq!(segment.blocks.iter().map(|block| block.size).sum::<u64>(), segment.bytes);
            }
            let allocated = layout.blocks().filter(|block| block.state == BlockState::Allocated);
            assert_eq!(allocated.map(|block| block.size).sum::<u64>(), stats.current.allocated);
        }
        assert_eq!(bench.watch.strategy.violations(), []);
    }

    fn teardown(witness: Witness, _: Program) {
        assert_eq!(witness.bench.finish(), [""; 0]);
    }
}

#[test]
fn random_programs_keep_the_contract() {
    // The default configuration reads PROPTEST_CASES; its own default would take too long for every
    // variant.
    let configured = Config::default();
    let chosen = std::env::var_os("PROPTEST_CASES").is_some();
    let cases = if chosen { configured.cases } else { CASES };
    let config = Config { cases, failure_persistence: None, ..configured };
    for entry in STRATEGIES {
        for parameters in entry.variants.iter().chain(&[""]) {
            let spec = StrategySpec { name: entry.name.to_owned(), parameters: (*parameters).to_owned() };
            let programs = Program::sequential_strategy(1..60);
            let outcome = TestRunner::new(config.clone()).run(&programs, |(mut program, steps, seen)| {
                program.spec = spec.clone();
                Witness::test_sequential(config.clone(), program, steps, seen);
                Ok(())
            });
            if let Err(failure) = outcome {
                panic!("{spec}: {failure}");
            }
        }
    }
}
