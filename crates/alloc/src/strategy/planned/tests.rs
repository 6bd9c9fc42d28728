//! Programs whose steps repeat, and programs whose steps do not quite.

use proptest::prelude::*;

use super::{Planned, Settings};
use crate::device::{
    CallKind, Device,
    wrap::{CallFailure, FaultPlan, FaultyDevice},
};
use crate::strategy::{
    Attempt, Block, Caller, Context, Control, Request, STRATEGIES, Setup, Silent, Strategy as _, StrategySpec,
    caching::Caching,
    conformance::{Bench, Step, Subject},
    test_device::simulated,
    wrap::Checked,
};
use oomph_base::{Address, MIB, SiteId, StreamId, ThreadId};
use oomph_pytorch::AllocatorSettings;

const STREAM: StreamId = StreamId::DEFAULT;

/// A strategy under watch and its device.
struct Desk {
    planned: Checked<Planned>,
    device: Box<dyn Device>,
    steps: u32,
}

impl Desk {
    fn new(parameters: &str) -> Desk {
        let settings = Settings::read(parameters).unwrap();
        let device = simulated(1024 * MIB);
        let setup = Setup { props: device.props(), limit: None };
        let planned = Checked::new(Planned::new(settings, Caching::new(AllocatorSettings::default(), &setup)));
        Desk { planned, device, steps: 0 }
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
fn steps_that_repeat_are_served_from_a_region_as_large_as_what_is_live() {
    let (mut desk, mut gradient) = (Desk::new(""), None);
    desk.alloc(100);
    let plans = [0; 3].map(|_| {
        desk.train(&mut gradient);
        (desk.count("plans"), desk.count("region_bytes"))
    });
    assert_eq!(plans, [(0, 0), (0, 0), (1, 0)], "a plan must prove itself before it gets memory");
    let places = desk.train(&mut gradient);
    assert_eq!((desk.count("plans"), desk.count("served_as_planned")), (1, 4));
    assert_eq!(desk.count("region_bytes"), 90 * MIB, "20, 30 and 40 are live at once");
    for _ in 0..3 {
        assert_eq!(desk.train(&mut gradient), places);
    }
    assert_eq!(desk.count("served_as_planned"), 16);
    assert_eq!((desk.count("unforeseen_requests"), desk.count("places_still_taken")), (0, 0));
    assert_eq!(desk.planned.stats().current.reserved, 190 * MIB, "the block that stays, and the region");
    assert_eq!(desk.count("peak_reserved_since_plan_bytes"), 190 * MIB);
}

#[test]
fn a_block_that_lives_longer_keeps_its_place() {
    let (mut desk, mut gradient) = (Desk::new("replan:off"), None);
    for _ in 0..4 {
        desk.train(&mut gradient);
    }
    let kept = gradient.take().unwrap();
    desk.train(&mut gradient);
    let taken = desk.count("places_still_taken");
    assert!(taken > 0, "its own place at least, and whatever else is planned there");
    assert_ne!(gradient.unwrap().address, kept.address);
    desk.free(kept);
    desk.train(&mut gradient);
    assert_eq!((desk.count("places_still_taken"), desk.count("plans")), (taken, 1));
}

#[test]
fn a_program_without_a_pattern_gets_new_plans_more_and_more_rarely_and_no_memory_for_them() {
    let mut desk = Desk::new("");
    let mut plans = Vec::new();
    for step in 0..24u64 {
        desk.next_step();
        let block = desk.alloc(20 + 2 * step);
        desk.free(block);
        plans.push(desk.count("plans"));
        assert_eq!(desk.count("region_bytes"), 0);
    }
    // Profiled in step 1; no step is like the one before: new plans after 1, 2, 4, 8 steps.
    assert_eq!(plans[..4], [0, 0, 1, 2]);
    assert_eq!((plans[5], plans[9], plans[17]), (3, 4, 5));
    assert!(desk.count("served_as_planned") == 0 && desk.count("unforeseen_requests") > 0);
}

#[test]
fn a_program_that_changes_gives_the_memory_of_its_plan_back_and_gets_another() {
    let (mut desk, mut gradient) = (Desk::new(""), None);
    for _ in 0..5 {
        desk.train(&mut gradient);
    }
    desk.free(gradient.take().unwrap());
    let mut regions = Vec::new();
    for _ in 0..5 {
        desk.next_step();
        let blocks = [50, 60].map(|mib| desk.alloc(mib));
        regions.push(desk.count("region_bytes") / MIB);
        blocks.into_iter().for_each(|block| desk.free(block));
    }
    // The first request of another size is one too many; the second step is the dry run of a new plan.
    assert_eq!((regions, desk.count("plans")), (vec![0, 0, 110, 110, 110], 2));
}

#[test]
fn without_step_marks_it_is_its_fallback() {
    let script = crate::strategy::conformance::mixed_script(7, 400, 30 * MIB, true);
    let script: Vec<Step> = script.into_iter().filter(|step| *step != Step::NextStep).collect();
    let play = |name: &str, parameters: &str| {
        let spec = StrategySpec { name: name.to_owned(), parameters: parameters.to_owned() };
        let build = |props: &crate::device::DeviceProps| spec.build(&Setup { props, limit: None });
        let mut bench = Bench::new(&Subject { build: &build, device: &simulated }, 256 * MIB).unwrap();
        let echoes: Vec<_> = bench.play(&script).into_iter().map(|(echo, stats)| (echo, stats.current)).collect();
        assert_eq!(bench.finish(), [""; 0]);
        echoes
    };
    assert_eq!(play("planned", "expandable_segments:False"), play("caching", ""));
}

/// A program of steps that are alike but for what a few random changes do to them.
fn nearly_periodic() -> impl Strategy<Value = Vec<Step>> {
    let request = (1..24u64, 0..2u16, 0..4usize);
    let change = (
        0..400usize,
        prop_oneof![
            Just(Step::Trim),
            Just(Step::Free { nth: 1 }),
            Just(Step::UsedOn { nth: 0, stream: StreamId(2) }),
            (1..30u64).prop_map(|mib| Step::Alloc { bytes: mib * MIB, stream: StreamId(0) }),
            Just(Step::Work { stream: StreamId(2), nanos: oomph_base::Nanos(1_000_000) }),
        ],
    );
    (prop::collection::vec(request, 1..12), prop::collection::vec(change, 0..12)).prop_map(|(requests, changes)| {
        let mut steps = Vec::new();
        for _ in 0..8 {
            steps.push(Step::NextStep);
            for &(mib, stream, nth) in &requests {
                steps.push(Step::Alloc { bytes: mib * MIB, stream: StreamId(stream) });
                if nth < 3 {
                    steps.push(Step::Free { nth });
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
    fn plans_and_what_goes_against_them_keep_every_promise(
        steps in nearly_periodic(),
        room in prop::sample::select(vec![96u64, 256, 2048]),
        (kind, turn) in (prop::sample::select(CallKind::ALL), 1..20u64),
    ) {
        let entry = STRATEGIES.iter().find(|entry| entry.name == "planned").unwrap();
        for spec in entry.specs() {
            let build = |props: &crate::device::DeviceProps| spec.build(&Setup { props, limit: None });
            let faulty = |bytes| -> Box<dyn Device> {
                let plan = FaultPlan::none().fail_nth(Some(kind), turn, CallFailure::UNKNOWN);
                Box::new(FaultyDevice::with(plan, simulated(bytes)))
            };
            let mut bench = Bench::new(&Subject { build: &build, device: &faulty }, room * MIB).unwrap();
            bench.play(&steps);
            prop_assert_eq!(bench.finish(), [""; 0]);
        }
    }
}
