//! A mixture of experts in place of a block's MLP: every token goes to some of them, and how many each gets is chance.
//!
//! Written as the usual loop over experts is: the rows of an expert's tokens are gathered, go through its MLP, are weighed
//! by the router's scores and added up in place. Derived from that code; no recording holds it.

use super::{
    embedding::INDEX,
    graph::{Edge, MOST_EDGES, Node, Operation, Origin, Value},
    machine::{Machine, Tensor},
    precision::Number,
    saving::Form,
    shape::Mixture,
    weights::BlockWeights,
};
use oomph_base::Work;
use oomph_trace::Category;

/// Scores that were chosen from, or weighed with: their bytes, for the gradient.
#[derive(Clone, Copy, Debug)]
pub(super) struct Routed {
    bytes: u64,
}

/// Rows that were gathered or added up: the bytes of their gradient.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gathered {
    bytes: u64,
}

impl Machine {
    /// Decides how many tokens of this pass each expert of each layer gets.
    pub(super) fn share_out_tokens(&mut self) {
        let Some(mixture) = self.plan.shape.mixture else { return };
        let tokens = self.tokens() as u32;
        self.graph.expert_tokens.clear();
        for _ in 0..self.layout.blocks.len() {
            let shares = (0..mixture.experts).map(|_| self.draw_share(&mixture)).collect::<Vec<_>>();
            self.graph.expert_tokens.extend(share_out(tokens, mixture.chosen, &shares));
        }
    }

    fn draw_share(&mut self, mixture: &Mixture) -> u64 {
        const EVEN: f64 = (1 << 20) as f64;
        let stray = EVEN * mixture.imbalance;
        self.random.between((EVEN - stray) as u64, (EVEN + stray) as u64).max(1)
    }

    /// Sends every row through its experts.
    pub(super) fn mixture(&mut self, layer: u32, input: Value, weights: &BlockWeights) -> Value {
        let (Some(router), Some(mixture)) = (weights.router, self.plan.shape.mixture) else { return input };
        let scores = self.linear(input, router, Category::Activation);
        let (chosen_scores, chosen) = self.route(scores, mixture.chosen);
        self.release(scores.tensor);
        let number = if self.plan.precision.is_autocast() { Number::Half } else { input.number };
        let bytes = self.bytes(input.tensor) / input.number.bytes() * number.bytes();
        let sum = self.alloc(bytes, Category::Activation);
        self.elementwise(bytes, [sum]);
        let mut output = Value { tensor: sum, number, origin: Origin::Constant };
        for expert in 0..mixture.experts {
            let tokens = self.graph.expert_tokens[(layer * mixture.experts + expert) as usize];
            if tokens == 0 {
                continue;
            }
            let further = expert * weights.weights_per_expert;
            // Which tokens, and as which of their choices.
            let places = self.alloc(2 * INDEX * u64::from(tokens), Category::Activation);
            let rows = self.gather(input, tokens, places);
            let raised = self.linear(rows, weights.up.later(further), Category::Temporary);
            self.release(rows.tensor);
            let hidden = self.relu(raised);
            let lowered = self.linear(hidden, weights.down.later(further), Category::Temporary);
            self.release(hidden.tensor);
            let weighed = self.weigh(lowered, chosen_scores);
            self.release(lowered.tensor);
            output = self.scatter(output, weighed, places);
            self.release_all([weighed.tensor, places]);
        }
        self.release_all([chosen_scores.tensor, chosen]);
        output
    }

    /// The best scores of every row, and whose they are.
    fn route(&mut self, scores: Value, chosen: u32) -> (Value, Tensor) {
        let bytes = self.bytes(scores.tensor);
        let count = self.tokens() * u64::from(chosen);
        let first_saved = self.begin_saving();
        let probabilities = self.alloc(bytes, Category::Activation);
        let best = self.alloc(count * scores.number.bytes(), Category::Activation);
        let whose = self.alloc(count * INDEX, Category::Activation);
        self.elementwise(3 * bytes, [scores.tensor, probabilities, best, whose]);
        let origin = if self.records(scores.origin.needs_gradient()) {
            self.save(probabilities, Form::Dense);
            self.save(whose, Form::Dense);
            let edges = [scores.origin.edge(), Edge::Nowhere, Edge::Nowhere];
            self.record(Operation::Route(Routed { bytes }), first_saved, edges)
        } else {
            Origin::Constant
        };
        self.release(probabilities);
        (Value { tensor: best, number: scores.number, origin }, whose)
    }

    /// The gradients of the best scores among zeros, then those of all.
    pub(super) fn route_backward(&mut self, node: &Node, routed: Routed, incoming: Tensor) -> Tensor {
        let saved = self.unpack(node);
        let among_zeros = self.temporary(routed.bytes);
        self.elementwise(2 * routed.bytes, [incoming, among_zeros]);
        let gradient = self.temporary(routed.bytes);
        self.elementwise(3 * routed.bytes, [among_zeros, saved.operand(0, incoming), gradient]);
        self.release(among_zeros);
        self.drop_unpacked(&saved);
        gradient
    }

    fn gather(&mut self, source: Value, tokens: u32, places: Tensor) -> Value {
        let of_source = self.bytes(source.tensor);
        let bytes = of_source / self.tokens() * u64::from(tokens);
        let first_saved = self.begin_saving();
        let rows = self.alloc(bytes, Category::Activation);
        self.elementwise(2 * bytes, [source.tensor, places, rows]);
        let origin = if self.records(source.origin.needs_gradient()) {
            self.save(places, Form::Dense);
            let edges = [source.origin.edge(), Edge::Nowhere, Edge::Nowhere];
            self.record(Operation::Gather(Gathered { bytes: of_source }), first_saved, edges)
        } else {
            Origin::Constant
        };
        Value { tensor: rows, number: source.number, origin }
    }

    /// Zeros, and the gradient of every row where it came from.
    pub(super) fn gather_backward(&mut self, node: &Node, gathered: Gathered, incoming: Tensor) -> Tensor {
        let saved = self.unpack(node);
        let gradient = self.temporary(gathered.bytes);
        self.elementwise(gathered.bytes, [gradient]);
        let traffic = 2 * self.bytes(incoming);
        self.elementwise(traffic, [incoming, saved.operand(0, incoming), gradient]);
        self.drop_unpacked(&saved);
        gradient
    }

    fn weigh(&mut self, rows: Value, scores: Value) -> Value {
        let bytes = self.bytes(rows.tensor);
        let first_saved = self.begin_saving();
        let weighed = self.alloc(bytes, Category::Temporary);
        self.elementwise(2 * bytes, [rows.tensor, scores.tensor, weighed]);
        let needs_gradient = rows.origin.needs_gradient() || scores.origin.needs_gradient();
        let origin = if self.records(needs_gradient) {
            self.save(rows.tensor, Form::Dense);
            self.save(scores.tensor, Form::Dense);
            let edges = [rows.origin.edge(), scores.origin.edge(), Edge::Nowhere];
            let routed = Routed { bytes: self.bytes(scores.tensor) };
            self.record(Operation::Weigh(routed), first_saved, edges)
        } else {
            Origin::Constant
        };
        Value { tensor: weighed, number: rows.number, origin }
    }

    /// The gradients of rows and scores; the latter are sums over each row.
    pub(super) fn weigh_backward(
        &mut self,
        node: &Node,
        routed: Routed,
        incoming: Tensor,
    ) -> [Option<Tensor>; MOST_EDGES] {
        let saved = self.unpack(node);
        let (rows, scores) = (saved.operand(0, incoming), saved.operand(1, incoming));
        let bytes = self.bytes(incoming);
        let [to_rows, to_scores, _] = node.edges;
        let mut gradients = [None; MOST_EDGES];
        if to_rows != Edge::Nowhere {
            let of_rows = self.temporary(bytes);
            self.elementwise(2 * bytes, [incoming, scores, of_rows]);
            gradients[0] = Some(of_rows);
        }
        if to_scores != Edge::Nowhere {
            let product = self.temporary(bytes);
            self.elementwise(3 * bytes, [incoming, rows, product]);
            let of_scores = self.temporary(routed.bytes);
            self.work(Work::Reduction { bytes }, [product, of_scores]);
            self.release(product);
            gradients[1] = Some(of_scores);
        }
        self.drop_unpacked(&saved);
        gradients
    }

    fn scatter(&mut self, sum: Value, rows: Value, places: Tensor) -> Value {
        let bytes = self.bytes(rows.tensor);
        let first_saved = self.begin_saving();
        self.elementwise(3 * bytes, [rows.tensor, places, sum.tensor]);
        let origin = if self.records(sum.origin.needs_gradient() || rows.origin.needs_gradient()) {
            self.save(places, Form::Dense);
            let edges = [sum.origin.edge(), rows.origin.edge(), Edge::Nowhere];
            self.record(Operation::Scatter(Gathered { bytes }), first_saved, edges)
        } else {
            Origin::Constant
        };
        Value { origin, ..sum }
    }

    /// The gradient as it is for the sum so far, and its rows for what was added.
    pub(super) fn scatter_backward(
        &mut self,
        node: &Node,
        gathered: Gathered,
        incoming: Tensor,
    ) -> [Option<Tensor>; MOST_EDGES] {
        let saved = self.unpack(node);
        let of_rows = self.temporary(gathered.bytes);
        self.elementwise(2 * gathered.bytes, [incoming, saved.operand(0, incoming), of_rows]);
        self.drop_unpacked(&saved);
        let of_sum = (node.edges[0] != Edge::Nowhere).then(|| self.retain(incoming));
        [of_sum, Some(of_rows), None]
    }
}

/// How many tokens each expert gets, by its share; together all their choices, and none more than there are.
fn share_out(tokens: u32, chosen: u32, shares: &[u64]) -> Vec<u32> {
    let (all, whole) = (u64::from(tokens) * u64::from(chosen), shares.iter().sum::<u64>().max(1));
    let part = |share: &u64| ((u128::from(all) * u128::from(*share) / u128::from(whole)) as u32).min(tokens);
    let mut counts: Vec<u32> = shares.iter().map(part).collect();
    let mut left = all - counts.iter().map(|count| u64::from(*count)).sum::<u64>();
    for count in &mut counts {
        let more = left.min(u64::from(tokens - *count));
        *count += more as u32;
        left -= more;
    }
    counts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::share_out;
    use crate::Recipe;
    use oomph_trace::{Category, Op, Summary, Trace, check};

    fn small(settings: &[(&str, &str)]) -> Recipe {
        let shape = [("layers", "2"), ("width", "64"), ("heads", "4"), ("vocab", "500"), ("context", "64")];
        let more = [("batch", "4"), ("steps", "3")];
        let all = shape.iter().chain(&more).chain(settings);
        all.fold(Recipe::named("gpt-moe-8x124m").unwrap(), |recipe, (key, text)| recipe.with(key, text))
    }

    fn summary(settings: &[(&str, &str)]) -> Summary {
        check(&small(settings).workload().unwrap()).unwrap()
    }

    #[test]
    fn every_expert_brings_its_own_weights_and_a_column_of_scores() {
        let weights = |experts| {
            let trace = Trace::read(&small(&[("experts", experts), ("steps", "1")]).workload().unwrap()).unwrap();
            let tags = trace.tables.tags();
            let sizes = trace.events.iter().filter_map(|event| match event.op {
                Op::Alloc { bytes, tag, .. } if tags[tag.index()].category == Category::Parameter => Some(bytes),
                _ => None,
            });
            sizes.sum::<u64>()
        };
        let mlp = (64 * 256 * 2 + 256 + 64) * 4;
        // Two blocks, four experts more, and a longer row of scores.
        assert_eq!(weights("8") - weights("4"), 2 * (4 * mlp + 4 * 64 * 4));
    }

    #[test]
    fn another_seed_shares_tokens_out_otherwise() {
        let events = |seed| Trace::read(&small(&[]).seed(seed).workload().unwrap()).unwrap().events;
        assert!(events(1) == events(1));
        assert!(events(1) != events(2));
    }

    #[test]
    fn more_choices_than_experts_are_refused() {
        let error = small(&[("experts", "2"), ("chosen_experts", "3")]).workload().err().unwrap().to_string();
        assert_eq!(error, "workload 'gpt-moe-8x124m': chosen_experts (3) must not exceed experts (2)");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        #[test]
        fn every_token_gets_its_choices_and_no_expert_a_token_twice(
            (tokens, chosen) in (1..5000_u32, 1..6_u32),
            shares in prop::collection::vec(1..1000_u64, 6..40),
        ) {
            let counts = share_out(tokens, chosen, &shares);
            prop_assert_eq!(counts.iter().map(|count| u64::from(*count)).sum::<u64>(), u64::from(tokens) * u64::from(chosen));
            prop_assert!(counts.iter().all(|count| *count <= tokens));
        }

        #[test]
        fn mixtures_train_without_contradiction_and_leave_the_same_behind(
            techniques in prop::sample::select(vec![
                "", "amp", "ckpt", "amp,ckpt", "accum2", "offload", "offload_params", "inplace", "zero3:2", "lora",
                "tensor_parallel:2", "pipeline:2,accum2", "bf16_model,sgd", "chunked_loss",
            ]),
            (experts, chosen, imbalance) in (2..10_u32, 1..3_u32, 0.0..1.0_f64),
            seed in any::<u64>(),
        ) {
            let settings = [
                ("experts", experts.to_string()), ("chosen_experts", chosen.to_string()),
                ("imbalance", imbalance.to_string()), ("techniques", techniques.to_owned()),
            ];
            let of = |steps: &str| {
                let settings = settings.each_ref().map(|(key, value)| (*key, value.as_str()));
                let recipe = small(&settings).with("steps", steps).seed(seed);
                check(&recipe.workload().unwrap()).unwrap()
            };
            // An expert that had no token yet has no optimizer state: compare late steps only.
            let (short, long) = (of("12"), of("16"));
            prop_assert_eq!(short.live_bytes, long.live_bytes);
        }
    }

    #[test]
    fn checkpoints_save_memory_with_experts_too() {
        // A batch large enough for activations to matter beside weights.
        let peak = |techniques| summary(&[("batch", "64"), ("techniques", techniques)]).peak.bytes;
        assert!(peak("ckpt") < peak(""), "{} and {}", peak("ckpt"), peak(""));
    }
}
