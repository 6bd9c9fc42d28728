//! Programs whose steps repeat exactly, and programs whose steps do not.

use proptest::prelude::*;

use super::{PlannedSettings, PlannedStrategy};
use crate::device::{
    CallKind, Device,
    wrap::{CallFailure, FaultPlan, FaultyDevice},
};
use crate::strategy::{
    Attempt, Block, Caller, Context, Control, Request, STRATEGIES, Setup, Silent, Strategy as _, StrategySpec,
    caching::Caching,
    conformance::{ConformanceProgram, ConformanceSubject, ProgramStep},
    test_device::simulated,
    wrap::CheckedStrategy,
};
use oomph_base::{Address, MIB, SiteId, StreamId, ThreadId};
use oomph_pytorch::AllocatorSettings;

const STREAM: StreamId = StreamId::DEFAULT;

/// A checked strategy and its device.
struct PlannedBench {
    planned: CheckedStrategy<PlannedStrategy>,
    device: Box<dyn Device>,
    steps: u32,
}

impl PlannedBench {
    fn new(parameters: &str) -> PlannedBench {
        let settings = PlannedSettings::read(parameters).unwrap();
        let device = simulated(1024 * MIB);
        let setup = Setup { props: device.props(), limit: None };
        let planned =
            CheckedStrategy::new(PlannedStrategy::new(settings, Caching::new(AllocatorSettings::default(), &setup)));
        PlannedBench { planned, device, steps: 0 }
    }

    fn next_step(&mut self) {
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        self.planned.control(&mut cx, &Control::StepBegins(self.steps)).unwrap();
        self.steps += 1;
    }

    fn alloc(&mut self, mib: u64) -> Block {
        let request = Request { bytes: mib * MIB, stream: STREAM, thread: ThreadId(0), site: SiteId(0) };
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        let attempt = self.planned.alloc(&mut cx, &request).unwrap();
        self.planned.audit();
        assert_eq!(self.planned.violations(), []);
        match attempt {
            Attempt::Served(block, _) => block,
            Attempt::OutOfMemory(shortage) => panic!("{shortage:?}"),
        }
    }

    fn free(&mut self, block: Block) {
        let mut cx = Context { device: &mut *self.device, sink: &mut Silent };
        self.planned.free(&mut cx, block, Caller::default()).unwrap();
        self.planned.audit();
        assert_eq!(self.planned.violations(), []);
    }

    /// One training step: two activations, a temporary, and a gradient that the next step frees.
    fn train(&mut self, gradient: &mut Option<Block>) -> Vec<Address> {
        self.next_step();
        if let Some(old) = gradient.take() {
            self.free(old);
        }
        let (first, second) = (self.alloc(20), self.alloc(30));
        let temporary = self.alloc(40);
        self.free(temporary);
        let new = self.alloc(10);
        self.free(second);
        self.free(first);
        *gradient = Some(new);
        vec![first.address, second.address, temporary.address, new.address]
    }

    fn count(&self, name: &str) -> u64 {
        let found = self.planned.details().into_iter().find(|(counter, _)| *counter == name);
        found.unwrap().1
    }
}

#[test]
fn repeated_steps_need_a_region_of_their_live_bytes() {
    let (mut bench, mut gradient) = (PlannedBench::new(""), None);
    bench.alloc(100);
    let plans = [0; 3].map(|_| {
        bench.train(&mut gradient);
        (bench.count("plans"), bench.count("region_bytes"))
    });
    assert_eq!(plans, [(0, 0), (0, 0), (1, 0)], "a plan must prove itself before it gets memory");
    let places = bench.train(&mut gradient);
    assert_eq!((bench.count("plans"), bench.count("served_as_planned")), (1, 4));
    assert_eq!(bench.count("region_bytes"), 90 * MIB, "20, 30 and 40 are live at once");
    for _ in 0..3 {
        assert_eq!(bench.train(&mut gradient), places);
    }
    assert_eq!(bench.count("served_as_planned"), 16);
    assert_eq!((bench.count("unforeseen_requests"), bench.count("places_still_taken")), (0, 0));
    assert_eq!(bench.planned.stats().current.reserved, 190 * MIB, "the block that stays, and the region");
    assert_eq!(bench.count("peak_reserved_since_plan_bytes"), 190 * MIB);
}

#[test]
fn a_block_that_lives_longer_keeps_its_offset() {
    let (mut bench, mut gradient) = (PlannedBench::new("replan:off"), None);
    for _ in 0..4 {
        bench.train(&mut gradient);
    }
    let kept = gradient.take().unwrap();
    bench.train(&mut gradient);
    let taken = bench.count("places_still_taken");
    assert!(taken > 0, "its own place at least, and whatever else is planned there");
    assert_ne!(gradient.unwrap().address, kept.address);
    bench.free(kept);
    bench.train(&mut gradient);
    assert_eq!((bench.count("places_still_taken"), bench.count("plans")), (taken, 1));
}

#[test]
fn without_a_pattern_plans_become_rare() {
    let mut bench = PlannedBench::new("");
    let mut plans = Vec::new();
    for step in 0..24u64 {
        bench.next_step();
        let block = bench.alloc(20 + 2 * step);
        bench.free(block);
        plans.push(bench.count("plans"));
        assert_eq!(bench.count("region_bytes"), 0);
    }
    // Profiled in step 1; no step is like the one before: new plans after 1, 2, 4, 8 steps.
    assert_eq!(plans[..4], [0, 0, 1, 2]);
    assert_eq!((plans[5], plans[9], plans[17]), (3, 4, 5));
    assert!(bench.count("served_as_planned") == 0 && bench.count("unforeseen_requests") > 0);
}

#[test]
fn a_changed_program_gets_a_new_plan() {
    let (mut bench, mut gradient) = (PlannedBench::new(""), None);
    for _ in 0..5 {
        bench.train(&mut gradient);
    }
    bench.free(gradient.take().unwrap());
    let mut regions = Vec::new();
    for _ in 0..5 {
        bench.next_step();
        let blocks = [50, 60].map(|mib| bench.alloc(mib));
        regions.push(bench.count("region_bytes") / MIB);
        blocks.into_iter().for_each(|block| bench.free(block));
    }
    // The first request of another size is one too many; the second step is the dry run of a new
    // plan.
    assert_eq!((regions, bench.count("plans")), (vec![0, 0, 110, 110, 110], 2));
}

#[test]
fn a_block_in_a_region_does_not_keep_the_rest_of_it_from_the_program() {
    let mut bench = PlannedBench::new("");
    let mut gradient = None;
    for _ in 0..8 {
        bench.train(&mut gradient);
    }
    assert!(bench.count("region_bytes") > 0 && bench.count("served_in_free_ranges") == 0);
    // Another program, while the gradient is left in the region: it needs all of the device but the gradient.
    bench.next_step();
    let blocks: Vec<Block> = (0..96).map(|_| bench.alloc(10)).collect();
    assert!(bench.count("served_in_free_ranges") > 0);
    blocks.into_iter().chain(gradient).for_each(|block| bench.free(block));
}

#[test]
fn without_step_marks_it_is_its_fallback() {
    let script = crate::strategy::conformance::mixed_script(7, 400, 30 * MIB, true);
    let script: Vec<ProgramStep> = script.into_iter().filter(|step| *step != ProgramStep::NextStep).collect();
    let play = |name: &str, parameters: &str| {
        let spec = StrategySpec { name: name.to_owned(), parameters: parameters.to_owned() };
        let build = |props: &crate::device::DeviceProps| spec.build(&Setup { props, limit: None });
        let mut bench =
            ConformanceProgram::new(&ConformanceSubject { build: &build, device: &simulated }, 256 * MIB).unwrap();
        let echoes: Vec<_> = bench.play(&script).into_iter().map(|(echo, stats)| (echo, stats.current)).collect();
        assert_eq!(bench.finish(), [""; 0]);
        echoes
    };
    assert_eq!(play("planned", "expandable_segments:False"), play("caching", ""));
}

/// A program of steps that are alike but for what a few random changes do to them.
fn nearly_periodic() -> impl Strategy<Value = Vec<ProgramStep>> {
    let request = (1..24u64, 0..2u16, 0..4usize);
    let change = (
        0..400usize,
        prop_oneof![
            Just(ProgramStep::Trim),
            Just(ProgramStep::Free { nth: 1 }),
            Just(ProgramStep::UsedOn { nth: 0, stream: StreamId(2) }),
            (1..30u64).prop_map(|mib| ProgramStep::Alloc { bytes: mib * MIB, stream: StreamId(0) }),
            Just(ProgramStep::Work { stream: StreamId(2), nanos: oomph_base::Nanos(1_000_000) }),
        ],
    );
    (prop::collection::vec(request, 1..12), prop::collection::vec(change, 0..12)).prop_map(|(requests, changes)| {
        let mut steps = Vec::new();
        for _ in 0..8 {
            steps.push(ProgramStep::NextStep);
            for &(mib, stream, nth) in &requests {
                steps.push(ProgramStep::Alloc { bytes: mib * MIB, stream: StreamId(stream) });
                if nth < 3 {
                    steps.push(ProgramStep::Free { nth });
                }
            }
        }
        for (place, step) in changes {
            let place = place % (steps.len() + 1);
            steps.insert(place, step);
        }
        steps
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn deviating_programs_keep_every_promise(
        steps in nearly_periodic(),
        room in prop::sample::select(vec![96u64, 256, 2048]),
        (kind, turn) in (prop::sample::select(&CallKind::ALL[..]), 1..20u64),
    ) {
        let entry = STRATEGIES.iter().find(|entry| entry.name == "planned").unwrap();
        for spec in entry.specs() {
            let build = |props: &crate::device::DeviceProps| spec.build(&Setup { props, limit: None });
            let faulty = |bytes| -> Box<dyn Device> {
                let plan = FaultPlan::none().fail_nth(Some(kind), turn, CallFailure::UNKNOWN);
                Box::new(FaultyDevice::with(plan, simulated(bytes)))
            };
            let mut bench = ConformanceProgram::new(&ConformanceSubject { build: &build, device: &faulty }, room * MIB).unwrap();
            bench.play(&steps);
            prop_assert_eq!(bench.finish(), [""; 0]);
        }
    }
}

#[test]
fn settings_are_read_and_mistakes_explained() {
    let read = PlannedSettings::read("profile_step:3,minimum_size:64KiB,replan:off,expandable_segments:False").unwrap();
    let expected =
        PlannedSettings { profile_step: 3, minimum_size: 64 << 10, replan_above: None, expandable_segments: false };
    assert_eq!(read, expected);
    assert!(PlannedSettings::read("replan:2").unwrap_err().to_string().contains("not between 0 and 1"));
    assert!(PlannedSettings::read("profile:1").unwrap_err().to_string().contains("did you mean 'profile_step'?"));
}
