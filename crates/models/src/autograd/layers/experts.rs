//! A mixture of experts in place of a block's MLP: every token goes to some experts, and each expert gets a random
//! number of tokens.
//!
//! Follows the usual loop over experts: the rows of an expert's tokens are gathered, go through its MLP, are weighed by
//! the router's scores and added up in place. Derived from that code; no recording confirms it.
//!
//! [`GroupedExperts`] are run as transformers (5) does it with `grouped_mm`: the chosen rows are sorted by expert, and one
//! product takes all experts. No size depends on which experts are chosen.

use super::{INDEX, linear::LinearWeights, pointwise::Factor, scratch};
use crate::autograd::{
    graph::{
        GradientEdge, Gradients, GraphOperation, GroupedShape, MOST_EDGES, Tensor, Variable, VariableOrigin, WeightId,
    },
    machine::TensorMachine,
    plan::ExpertMixture,
    saving::UnpackedTensors,
    techniques::NumberFormat,
};
use oomph_base::{ProductRole, Work};
use oomph_trace::Category;

/// The weights of a block's experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertWeights {
    /// Scores every expert for every token.
    pub(crate) router: LinearWeights,
    /// The MLP of the first expert.
    pub(crate) up: LinearWeights,
    pub(crate) down: LinearWeights,
    /// Distance from the weights of one expert to those of the next.
    pub(crate) weights_per_expert: WeightId,
}

impl TensorMachine {
    /// Draws how many tokens of this pass each expert of each layer gets.
    pub(crate) fn draw_expert_tokens(&mut self, layers: u32) {
        const EVEN: f64 = (1 << 20) as f64;
        let Some(mixture) = self.plan.shape.mixture else { return };
        let (tokens, deviation) = (self.tokens() as u32, EVEN * mixture.imbalance);
        self.graph.expert_tokens.clear();
        for _ in 0..layers {
            let mut draw = || self.random.between((EVEN - deviation) as u64, (EVEN + deviation) as u64).max(1);
            let shares: Vec<u64> = (0..mixture.experts).map(|_| draw()).collect();
            self.graph.expert_tokens.extend(tokens_per_expert(tokens, mixture.chosen, &shares));
        }
    }

    /// Sends every row through its experts.
    pub(crate) fn mixture(
        &mut self,
        layer: u32,
        input: Variable,
        weights: &ExpertWeights,
        mixture: &ExpertMixture,
    ) -> Variable {
        let scores = self.linear(input, weights.router, Category::Activation);
        let (chosen_scores, chosen) = self.route(scores, mixture.chosen);
        self.release(scores.tensor);
        let number = if self.plan.precision.is_autocast() { NumberFormat::Half } else { input.number };
        let bytes = self.bytes(input.tensor) / input.number.bytes() * number.bytes();
        let sum = self.alloc(bytes, Category::Activation);
        self.elementwise(bytes, [sum]);
        let mut output = Variable::constant(sum, number);
        for expert in 0..mixture.experts {
            let tokens = self.graph.expert_tokens[(layer * mixture.experts + expert) as usize];
            if tokens == 0 {
                continue;
            }
            let offset = expert * weights.weights_per_expert;
            // Which tokens, and as which of their choices.
            let places = self.alloc(2 * INDEX * u64::from(tokens), Category::Activation);
            let rows = self.gather(input, tokens, places);
            let raised = self.linear(rows, weights.up.offset_by(offset), Category::Temporary);
            self.release(rows.tensor);
            let hidden = self.mlp_relu(raised);
            let lowered = self.linear(hidden, weights.down.offset_by(offset), Category::Temporary);
            self.release(hidden.tensor);
            let weighed = self.weigh(lowered, chosen_scores);
            self.release(lowered.tensor);
            output = self.scatter_add(output, weighed, places);
            self.release_all([weighed.tensor, places]);
        }
        self.release_all([chosen_scores.tensor, chosen]);
        output
    }

    /// The best scores of every row, and the experts that they belong to.
    fn route(&mut self, scores: Variable, chosen: u32) -> (Variable, Tensor) {
        let bytes = self.bytes(scores.tensor);
        let count = self.tokens() * u64::from(chosen);
        let probabilities = self.alloc(bytes, Category::Activation);
        let best = self.alloc(count * scores.number.bytes(), Category::Activation);
        let experts = self.alloc(count * INDEX, Category::Activation);
        self.elementwise(3 * bytes, [scores.tensor, probabilities, best, experts]);
        self.save_for(&[scores], [probabilities, experts]);
        let best = self.output_of(best, scores.number, GraphOperation::Route(bytes), &[scores]);
        self.release(probabilities);
        (best, experts)
    }

    /// The gradients of the best scores among zeros, then those of all scores.
    pub(crate) fn route_backward(&mut self, saved: &UnpackedTensors, bytes: u64, incoming: Tensor) -> Tensor {
        let among_zeros = self.temporary(bytes);
        self.elementwise(2 * bytes, [incoming, among_zeros]);
        let gradient = self.temporary(bytes);
        self.elementwise(3 * bytes, [among_zeros, saved.operand(0, incoming), gradient]);
        self.release(among_zeros);
        gradient
    }

    fn gather(&mut self, source: Variable, tokens: u32, places: Tensor) -> Variable {
        let of_source = self.bytes(source.tensor);
        let bytes = of_source / self.tokens() * u64::from(tokens);
        let rows = self.alloc(bytes, Category::Activation);
        self.elementwise(2 * bytes, [source.tensor, places, rows]);
        self.save_for(&[source], [places]);
        self.output_of(rows, source.number, GraphOperation::Gather(of_source), &[source])
    }

    /// Zeros, and the gradient of every row at its place.
    pub(crate) fn gather_backward(&mut self, saved: &UnpackedTensors, bytes: u64, incoming: Tensor) -> Tensor {
        let gradient = self.temporary(bytes);
        self.elementwise(bytes, [gradient]);
        let traffic = 2 * self.bytes(incoming);
        self.elementwise(traffic, [incoming, saved.operand(0, incoming), gradient]);
        gradient
    }

    fn weigh(&mut self, rows: Variable, scores: Variable) -> Variable {
        let bytes = self.bytes(rows.tensor);
        let weighed = self.alloc(bytes, Category::Temporary);
        self.elementwise(2 * bytes, [rows.tensor, scores.tensor, weighed]);
        self.save_for(&[rows, scores], [rows.tensor, scores.tensor]);
        let operation = GraphOperation::Weigh(self.bytes(scores.tensor));
        self.output_of(weighed, rows.number, operation, &[rows, scores])
    }

    /// The gradients of rows and scores; those of the scores are sums over each row.
    pub(crate) fn weigh_backward(&mut self, saved: &UnpackedTensors, of_scores: u64, incoming: Tensor) -> Gradients {
        let (rows, scores) = (saved.operand(0, incoming), saved.operand(1, incoming));
        let bytes = self.bytes(incoming);
        let [to_rows, to_scores, _] = saved.edges;
        let mut gradients = [None; MOST_EDGES];
        if to_rows.is_needed() {
            let of_rows = self.temporary(bytes);
            self.elementwise(2 * bytes, [incoming, scores, of_rows]);
            gradients[0] = Some(of_rows);
        }
        if to_scores.is_needed() {
            let product = self.temporary(bytes);
            self.elementwise(3 * bytes, [incoming, rows, product]);
            let of_scores = self.temporary(of_scores);
            self.work(Work::Reduction { bytes }, [product, of_scores]);
            self.release(product);
            gradients[1] = Some(of_scores);
        }
        gradients
    }

    fn scatter_add(&mut self, sum: Variable, rows: Variable, places: Tensor) -> Variable {
        let bytes = self.bytes(rows.tensor);
        self.elementwise(3 * bytes, [rows.tensor, places, sum.tensor]);
        self.save_for(&[sum, rows], [places]);
        self.output_of(sum.tensor, sum.number, GraphOperation::ScatterAdd(bytes), &[sum, rows])
    }

    /// The gradient as it is for the sum so far, and its rows for what was added.
    pub(crate) fn scatter_add_backward(&mut self, saved: &UnpackedTensors, bytes: u64, incoming: Tensor) -> Gradients {
        let of_rows = self.temporary(bytes);
        self.elementwise(2 * bytes, [incoming, saved.operand(0, incoming), of_rows]);
        let of_sum = saved.edges[0].is_needed().then(|| self.retain(incoming));
        [of_sum, Some(of_rows), None]
    }
}

/// Divides all choices of all tokens by the experts' shares; no expert gets more tokens than there are.
fn tokens_per_expert(tokens: u32, chosen: u32, shares: &[u64]) -> Vec<u32> {
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

/// Bytes of a count of rows, and of an offset.
const COUNT: u64 = 4;

/// The experts of a block, and how rows are divided among them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GroupedExperts {
    pub(crate) router: LinearWeights,
    /// The products that make the gate and what it gates, for all experts.
    pub(crate) raise: WeightId,
    pub(crate) lower: WeightId,
    pub(crate) experts: u32,
    /// Experts of a row.
    pub(crate) chosen: u32,
    pub(crate) width: u32,
    /// Numbers inside an expert.
    pub(crate) inner: u32,
}

impl TensorMachine {
    /// Every row through its experts, weighed and summed up.
    pub(crate) fn grouped_experts(&mut self, input: Variable, experts: &GroupedExperts) -> Variable {
        // The router sees the rows through a view of its own.
        let rows = self.output_of(input.tensor, input.number, GraphOperation::Copy, &[input]);
        let logits = self.linear(rows, experts.router, Category::Activation);
        let (scores, indices) = self.choose_experts(logits, experts);
        let output = self.run_groups(input, scores, experts);
        self.release_all([logits.tensor, scores.tensor, indices]);
        output
    }

    /// The scores of the chosen experts of every row, which sum to one, and their numbers.
    fn choose_experts(&mut self, logits: Variable, experts: &GroupedExperts) -> (Variable, Tensor) {
        let single = NumberFormat::Single;
        let wide = self.in_format(logits, single);
        let bytes = self.bytes(wide.tensor);
        let probabilities = self.alloc(bytes, Category::Activation);
        self.elementwise(2 * bytes, [wide.tensor, probabilities]);
        self.save_for(&[wide], [probabilities]);
        let probabilities = self.output_of(probabilities, single, GraphOperation::SoftMax, &[wide]);
        self.release(wide.tensor);

        let chosen = self.tokens() * u64::from(experts.chosen);
        let best = self.alloc(chosen * single.bytes(), Category::Activation);
        let indices = self.alloc(chosen * INDEX, Category::Activation);
        self.elementwise(bytes, [probabilities.tensor, indices, best]);
        self.save_for(&[probabilities], [indices]);
        let best = self.output_of(best, single, GraphOperation::Part { bytes }, &[probabilities]);
        let sums = self.temporary(self.tokens() * single.bytes());
        self.work(Work::Reduction { bytes: self.bytes(best.tensor) }, [best.tensor, sums]);
        let sums = self.output_of(sums, single, GraphOperation::Copy, &[best]);
        // The quotient is written over the scores, and backward needs the old ones.
        let before = self.temporary(self.bytes(best.tensor));
        self.save_for(&[best], [sums.tensor, before]);
        self.elementwise(3 * self.bytes(before), [before, sums.tensor, best.tensor]);
        let scores = self.output_of(best.tensor, single, GraphOperation::DivideByRow, &[best, sums]);
        self.release_all([before, sums.tensor, probabilities.tensor]);
        (scores, indices)
    }

    /// The incoming gradient times the softmax, and what is made of both.
    pub(crate) fn softmax_backward(&mut self, saved: &UnpackedTensors, incoming: Tensor) -> Tensor {
        let bytes = self.bytes(incoming);
        let [gradient, product] = [(); 2].map(|()| self.temporary(bytes));
        self.elementwise(5 * bytes, [saved.operand(0, incoming), incoming, product, gradient]);
        self.release(product);
        gradient
    }

    /// The gradients of numbers and of the number of their row. That of the divisor comes first: two quotients, the
    /// negated gradient and their product.
    pub(crate) fn divide_by_row_backward(&mut self, saved: &mut UnpackedTensors, incoming: Tensor) -> Gradients {
        let bytes = self.bytes(incoming);
        let (of_rows, divisors) = (self.bytes(saved.operand(0, incoming)), saved.operand(0, incoming));
        let temporaries = [(); 3].map(|()| self.temporary(bytes));
        let of_divisor = self.temporary(bytes);
        self.elementwise(8 * bytes, [incoming, divisors, saved.operand(1, incoming), of_divisor]);
        let [negated, first, second] = temporaries;
        self.release_all([second, first, negated]);
        let of_numbers = self.temporary(bytes);
        self.elementwise(3 * bytes, [incoming, divisors, of_numbers]);
        self.release_unpacked(saved);
        let sum = self.temporary(of_rows);
        self.work(Work::Reduction { bytes }, [of_divisor, sum]);
        self.release(of_divisor);
        [Some(of_numbers), Some(sum), None]
    }

    fn run_groups(&mut self, input: Variable, scores: Variable, experts: &GroupedExperts) -> Variable {
        let chosen = self.tokens() * u64::from(experts.chosen);
        let [sorted, order] = self.sort_by_expert(chosen);
        let rows = self.temporary(INDEX * chosen);
        let selected = self.pick_rows(input, rows, chosen, experts.width);
        self.release(rows);
        let weights = self.pick_rows(scores, order, chosen, 1);
        let numbers = self.temporary(COUNT * chosen);
        let [counts, offsets] = [(); 2].map(|()| self.temporary(COUNT * u64::from(experts.experts)));
        self.scratch(scratch::CUMULATIVE_SUM, offsets);

        let group = |inputs, outputs| GroupedShape { inputs, outputs, experts: experts.experts };
        let raised = self.grouped_linear(selected, experts.raise, offsets, group(experts.width, 2 * experts.inner));
        let [gate, up] = self.split_in_two(raised);
        let active = self.smooth_activation(gate);
        let hidden = self.multiply(active, up, Category::Activation);
        self.release_all([active.tensor, raised.tensor]);
        let lowered = self.grouped_linear(hidden, experts.lower, offsets, group(experts.inner, experts.width));
        self.release(hidden.tensor);

        let weighed = self.multiply(lowered, Factor::per_row(weights), Category::Temporary);
        let inverse = self.temporary(INDEX * chosen);
        let range = self.temporary(INDEX * chosen);
        self.elementwise(3 * INDEX * chosen, [order, range, inverse]);
        self.release(range);
        let restored = self.pick_rows(weighed, inverse, chosen, experts.width);
        self.release(weighed.tensor);
        let bytes = self.bytes(restored.tensor);
        let sum = self.temporary(bytes / u64::from(experts.chosen));
        self.work(Work::Reduction { bytes }, [restored.tensor, sum]);
        let sum = self.output_of(sum, restored.number, GraphOperation::RowMean { bytes }, &[restored]);
        let output = self.in_format(sum, input.number);
        self.release_all([sorted, order, selected.tensor, weights.tensor, numbers, counts, offsets]);
        self.release_all([lowered.tensor, restored.tensor, inverse, sum.tensor]);
        output
    }

    /// The numbers of all chosen experts in order, and where they came from.
    fn sort_by_expert(&mut self, count: u64) -> [Tensor; 2] {
        let [sorted, order, range] = [(); 3].map(|()| self.temporary(INDEX * count));
        if count > scratch::MOST_SORTED_IN_ONE_BLOCK {
            self.scratch(scratch::sort_pairs(count), sorted);
        }
        self.release(range);
        [sorted, order]
    }

    /// Rows of a variable, by index.
    fn pick_rows(&mut self, input: Variable, indices: Tensor, count: u64, width: u32) -> Variable {
        self.save_for(&[input], [indices]);
        let bytes = count * u64::from(width) * input.number.bytes();
        let rows = self.alloc(bytes, Category::Activation);
        self.elementwise(2 * bytes, [input.tensor, indices, rows]);
        let operation = GraphOperation::PickRows { bytes: self.size(input), count };
        self.output_of(rows, input.number, operation, &[input])
    }

    /// Zeros to which rows are added, sorted by index first (`index_put_` that accumulates).
    pub(crate) fn pick_rows_backward(
        &mut self,
        saved: &UnpackedTensors,
        bytes: u64,
        count: u64,
        incoming: Tensor,
    ) -> Tensor {
        let list = INDEX * count;
        let gradient = self.temporary(bytes);
        let [wrapped, linear] = [(); 2].map(|()| self.temporary(list));
        self.release(wrapped);
        let [sorted, origins, range] = [(); 3].map(|()| self.temporary(list));
        self.scratch(scratch::sort_indices(count), sorted);
        self.release_all([range, origins, sorted, linear]);
        let traffic = bytes + self.bytes(incoming);
        self.elementwise(traffic, [saved.operand(0, incoming), incoming, gradient]);
        gradient
    }

    /// Two halves of every row as views; their gradients are joined again.
    fn split_in_two(&mut self, input: Variable) -> [Variable; 2] {
        let records = self.records(input.needs_gradient());
        let place = records.then(|| self.record(GraphOperation::SplitTwo, &[input.edge()], 2));
        let part = Some(self.bytes(input.tensor) / 2);
        [0, 1].map(|number| Variable {
            origin: match place {
                None => VariableOrigin::Constant,
                Some(None) => VariableOrigin::Recomputed,
                Some(Some(place)) => VariableOrigin::Recorded(place + number),
            },
            part,
            ..input
        })
    }

    /// One tensor of two gradients.
    pub(crate) fn split_in_two_backward(&mut self, first: Tensor, second: Tensor) -> Tensor {
        let bytes = 2 * self.bytes(first);
        let joined = self.temporary(bytes);
        self.elementwise(2 * bytes, [first, second, joined]);
        joined
    }

    /// The product of every row with the weight of its expert.
    fn grouped_linear(&mut self, input: Variable, weight: WeightId, offsets: Tensor, shape: GroupedShape) -> Variable {
        let tensor = self.weight_on_device(weight);
        let trainable = self.weights[weight as usize].trainable;
        let records = self.records(trainable || input.needs_gradient());
        if records {
            self.save_weight(weight, true);
            self.save(offsets);
            self.save(input.tensor);
        }
        let number = input.number;
        let rows = self.bytes(input.tensor) / (u64::from(shape.inputs) * number.bytes());
        let output = self.alloc(rows * u64::from(shape.outputs) * number.bytes(), Category::Activation);
        let work = self.matrix_product(ProductRole::Output, rows, shape.outputs.into(), shape.inputs, number);
        self.grouped_product(work, shape.experts, number, [input.tensor, tensor, output]);
        let to_weight = if trainable { GradientEdge::Weight(weight) } else { GradientEdge::None };
        self.output(output, number, records, GraphOperation::GroupedLinear(shape, number), &[input.edge(), to_weight])
    }

    /// The gradients of input and weights; that of the weights comes first.
    pub(crate) fn grouped_linear_backward(
        &mut self,
        saved: &UnpackedTensors,
        shape: GroupedShape,
        number: NumberFormat,
        incoming: Tensor,
    ) -> Gradients {
        let GroupedShape { inputs, outputs, experts } = shape;
        let [to_input, to_weight, _] = saved.edges;
        let rows = self.bytes(incoming) / (u64::from(outputs) * number.bytes());
        let mut gradients = [None; MOST_EDGES];
        if to_weight.is_needed() {
            let numbers = u64::from(inputs) * u64::from(outputs) * u64::from(experts);
            let gradient = self.gradient_along(to_weight, numbers * number.bytes());
            let work =
                self.matrix_product(ProductRole::WeightGradient, outputs.into(), inputs.into(), rows as u32, number);
            self.grouped_product(work, experts, number, [incoming, saved.operand(2, incoming), gradient]);
            gradients[1] = Some(gradient);
        }
        if to_input.is_needed() {
            let gradient = self.temporary(rows * u64::from(inputs) * number.bytes());
            let work = self.matrix_product(ProductRole::InputGradient, rows, inputs.into(), outputs, number);
            self.grouped_product(work, experts, number, [incoming, saved.operand(0, incoming), gradient]);
            gradients[0] = Some(gradient);
        }
        gradients
    }

    /// One kernel for all experts in 16 bits, a product for each in single precision.
    fn grouped_product(&mut self, work: Work, experts: u32, number: NumberFormat, operands: [Tensor; 3]) {
        if number == NumberFormat::Single {
            self.ensure_matrix_workspace();
            self.work(work, operands);
            return;
        }
        let arguments = self.alloc(scratch::group_arguments(experts), Category::Workspace);
        let workspace = self.alloc(scratch::GROUPED_PRODUCT, Category::Workspace);
        self.work(work, operands);
        self.release_all([workspace, arguments]);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::tokens_per_expert;
    use crate::Recipe;
    use oomph_trace::{Category, Op, Trace, TraceSummary, check};

    fn small(settings: &[(&str, &str)]) -> Recipe {
        let shape = [("layers", "2"), ("width", "64"), ("heads", "4"), ("vocab", "500"), ("context", "64")];
        let more = [("batch", "4"), ("steps", "3")];
        let all = shape.iter().chain(&more).chain(settings);
        all.fold(Recipe::named("reference-gpt-moe-560m").unwrap(), |recipe, (key, text)| recipe.with(key, text))
    }

    fn summary(settings: &[(&str, &str)]) -> TraceSummary {
        check(&small(settings).workload().unwrap()).unwrap()
    }

    #[test]
    fn every_expert_has_weights_and_a_score() {
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
    fn another_seed_draws_other_shares() {
        let events = |seed| Trace::read(&small(&[]).seed(seed).workload().unwrap()).unwrap().events;
        assert!(events(1) == events(1));
        assert!(events(1) != events(2));
    }

    #[test]
    fn too_many_choices_are_refused() {
        let error = small(&[("experts", "2"), ("chosen_experts", "3")]).workload().err().unwrap().to_string();
        assert_eq!(error, "workload 'reference-gpt-moe-560m': chosen_experts (3) must not exceed experts (2)");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]

        #[test]
        fn every_token_gets_its_choices(
            (tokens, chosen) in (1..5000_u32, 1..6_u32),
            shares in prop::collection::vec(1..1000_u64, 6..40),
        ) {
            let counts = tokens_per_expert(tokens, chosen, &shares);
            prop_assert_eq!(counts.iter().map(|count| u64::from(*count)).sum::<u64>(), u64::from(tokens) * u64::from(chosen));
            prop_assert!(counts.iter().all(|count| *count <= tokens));
        }

        #[test]
        fn mixtures_train_and_keep_their_level(
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
    fn checkpoints_save_memory_with_experts() {
        // A batch large enough for activations to matter beside weights.
        let peak = |techniques| summary(&[("batch", "64"), ("techniques", techniques)]).peak.bytes;
        assert!(peak("ckpt") < peak(""), "{} and {}", peak("ckpt"), peak(""));
    }
}
