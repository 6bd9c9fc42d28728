//! Attention over queries, keys and values, which lie in one tensor or in three.
//!
//! Unless the program names a kernel, the number format decides which fused one PyTorch takes: memory-efficient attention
//! for single precision, cuDNN's for 16 bits on a Hopper GPU. A mask that needs a gradient always takes the first.
//!
//! Where no fused kernel fits, in single precision with heads that share keys and values, PyTorch falls back to plain
//! operators, which keep the scores of every pair of tokens. Relative positions are a learned number per head and distance
//! of two tokens, added to the scores.

use super::{INDEX, KEYS_STEP, embedding::Lookup, scratch};
use crate::autograd::{
    graph::{
        AttentionKernel, AttentionShape, GradientEdge, GradientPlace, Gradients, GraphOperation, MOST_EDGES,
        SavingMode, Tensor, Variable, VariableOrigin, WeightId,
    },
    machine::TensorMachine,
    saving::UnpackedTensors,
    techniques::NumberFormat,
};
use oomph_base::{Work, round_up};
use oomph_trace::Category;

/// Memory-efficient attention pads its row sums to this many rows.
const ROW_SUM_PADDING: u64 = 32;
/// Memory-efficient attention takes masks whose rows have a multiple of this many numbers (`preprocess_mask`).
const MASK_ALIGNMENT: u64 = 8;
/// The rows of a mask's gradient have a multiple of this many numbers (`_efficient_attention_backward`).
const MASK_GRADIENT_ALIGNMENT: u64 = 16;
/// Bytes of a seed, and of an offset into its random numbers, which cuDNN's kernel keeps even without dropout.
const SEED: u64 = 8;

/// A call of a kernel: queries, keys and values, and a mask that is added to the scores.
struct AttentionCall {
    inputs: [Tensor; MOST_EDGES],
    mask: Option<Tensor>,
    shape: AttentionShape,
    kernel: AttentionKernel,
    /// Whether scores are dropped.
    drops: bool,
    operation: GraphOperation,
}

impl AttentionCall {
    /// A call without a mask.
    fn plain(inputs: [Tensor; MOST_EDGES], shape: AttentionShape, kernel: AttentionKernel) -> AttentionCall {
        let operation = GraphOperation::Attention(shape, kernel);
        AttentionCall { inputs, mask: None, shape, kernel, drops: false, operation }
    }
}

/// The places of the saved tensors: queries, keys and values come first.
const SAVED_INPUTS: usize = 0;
const SAVED_ROW_SUMS: usize = 3;

impl TensorMachine {
    /// Attention of every token to those before it. Queries, keys and values are views of one tensor.
    pub(crate) fn attention(&mut self, query_key_value: Variable) -> Variable {
        let heads = self.plan.local_heads();
        let shape = AttentionShape {
            number: query_key_value.number,
            heads,
            key_value_heads: heads,
            head_width: self.plan.shape.head_width(),
            is_causal: true,
        };
        let records = self.records(query_key_value.needs_gradient());
        let edges = if records { self.split(query_key_value) } else { [GradientEdge::None; MOST_EDGES] };
        let kernel = AttentionKernel::of(shape.number, false);
        self.attend(AttentionCall::plain([query_key_value.tensor; MOST_EDGES], shape, kernel), records, &edges)
    }

    /// Attention over queries, keys and values in tensors of their own.
    pub(crate) fn grouped_attention(&mut self, inputs: [Variable; MOST_EDGES], shape: AttentionShape) -> Variable {
        self.kernel_attention(inputs, shape, AttentionKernel::of(shape.number, false), false)
    }

    /// The same, by a kernel that the program names, with dropout of the scores where it asks for it.
    pub(crate) fn kernel_attention(
        &mut self,
        inputs: [Variable; MOST_EDGES],
        shape: AttentionShape,
        kernel: AttentionKernel,
        drops: bool,
    ) -> Variable {
        let records = self.records(inputs.iter().any(Variable::needs_gradient));
        let edges = inputs.map(|input| input.edge());
        let call = AttentionCall { drops, ..AttentionCall::plain(inputs.map(|input| input.tensor), shape, kernel) };
        self.attend(call, records, &edges)
    }

    /// The same, with a mask of numbers for all sequences that is added to the scores.
    pub(crate) fn masked_attention(
        &mut self,
        inputs: [Variable; MOST_EDGES],
        mask: Variable,
        shape: AttentionShape,
    ) -> Variable {
        let narrow = self.cast_for_product(mask);
        let has_gradient = narrow.needs_gradient();
        let records = has_gradient || self.records(inputs.iter().any(Variable::needs_gradient));
        let place = if has_gradient { self.record(GraphOperation::ExpandMask, &[narrow.edge()], 1) } else { None };
        let call = AttentionCall {
            inputs: inputs.map(|input| input.tensor),
            mask: Some(narrow.tensor),
            shape,
            kernel: AttentionKernel::of(shape.number, has_gradient),
            drops: false,
            operation: GraphOperation::MaskedAttention(shape, place),
        };
        let output = self.attend(call, records, &inputs.map(|input| input.edge()));
        if narrow.tensor != mask.tensor {
            self.release(narrow.tensor);
        }
        output
    }

    /// Which tokens a token attends to: a flag for every pair, of those before it within a window (transformers'
    /// `sdpa_mask` with `sliding_window_overlay` and `causal_mask_function`).
    pub(crate) fn window_flags(&mut self) -> Tensor {
        let length = u64::from(self.graph.length);
        let (of_tokens, of_pairs) = (INDEX * length, length * length);
        let of_batch = [u64::from(self.graph.sequences), 1].map(|count| self.temporary(INDEX * count));
        let places = [(); 2].map(|()| {
            let range = self.temporary(of_tokens);
            self.replaced(range, of_tokens)
        });
        let all = self.temporary(1);
        let first = self.temporary(of_tokens);
        let within = self.temporary(of_pairs);
        self.elementwise(of_pairs, [places[1], first, within]);
        self.release(first);
        let within_all = self.temporary(of_pairs);
        self.elementwise(2 * of_pairs, [within, within_all]);
        self.release_all([within, all]);
        let earlier = self.temporary(of_pairs);
        let flags = self.temporary(of_pairs);
        self.elementwise(4 * of_pairs, [earlier, within_all, flags]);
        self.release_all([earlier, within_all]);
        self.release_all(of_batch);
        self.release_all(places);
        flags
    }

    /// Attention where these flags allow it. Heads that share keys and values get copies of them, for a mask excludes
    /// `enable_gqa` (transformers' `use_gqa_in_sdpa`).
    pub(crate) fn flagged_attention(
        &mut self,
        inputs: [Variable; 3],
        flags: Tensor,
        shape: AttentionShape,
    ) -> Variable {
        let [query, key, value] = inputs;
        let [key, value] = [key, value].map(|heads| {
            let bytes = self.size(heads) / u64::from(shape.key_value_heads) * u64::from(shape.heads);
            match shape.key_value_heads {
                1 if shape.heads > 1 => self.one_head_for_all(heads, bytes),
                _ => self.heads_of_all(heads, &shape, bytes),
            }
        });
        let shape = AttentionShape { key_value_heads: shape.heads, is_causal: false, ..shape };
        // Autocast casts the last argument first.
        let narrow_value = self.cast_for_product(value);
        let narrow_key = self.cast_for_product(key);
        let narrow_query = self.cast_for_product(query);
        let mask = self.mask_of_flags(flags, shape.number);
        let attended = self.masked_attention([narrow_query, narrow_key, narrow_value], mask, shape);
        self.release(mask.tensor);
        for (narrow, wide) in [(narrow_query, query), (narrow_key, key), (narrow_value, value)] {
            if narrow.tensor != wide.tensor {
                self.release(narrow.tensor);
            }
        }
        self.release_all([value.tensor, key.tensor]);
        attended
    }

    /// Zero or minus infinity for every flag and sequence (`convert_boolean_attn_mask`); memory-efficient attention takes
    /// longer rows (`preprocess_mask`).
    fn mask_of_flags(&mut self, flags: Tensor, number: NumberFormat) -> Variable {
        let (tokens, length) = (self.tokens(), u64::from(self.graph.length));
        let constants = [(); 2].map(|()| self.temporary(number.bytes()));
        let mut mask = self.alloc(tokens * length * number.bytes(), Category::Activation);
        self.elementwise(self.bytes(mask) + self.bytes(flags), [flags, mask]);
        self.release_all(constants);
        let columns = round_up(length, MASK_ALIGNMENT);
        if number == NumberFormat::Single && columns > length {
            let padded = self.alloc(tokens * columns * number.bytes(), Category::Activation);
            self.elementwise(self.bytes(mask) + self.bytes(padded), [mask, padded]);
            self.release(std::mem::replace(&mut mask, padded));
        }
        Variable::constant(mask, number)
    }

    fn attend(&mut self, call: AttentionCall, records: bool, edges: &[GradientEdge; MOST_EDGES]) -> Variable {
        let AttentionCall { inputs: [query, key, value], mask, shape, kernel, drops, operation } = call;
        let number = shape.number;
        let [bytes, of_keys, of_values] = self.attention_bytes(&shape);
        if records {
            self.save_heads(key, of_keys, shape.key_value_heads);
            self.save_heads(query, bytes, shape.heads);
            self.save_heads(value, of_values, shape.key_value_heads);
        }
        let seeds = match kernel {
            AttentionKernel::Cudnn => Some([(); 2].map(|()| self.kept_result(SEED, Category::Activation).0)),
            AttentionKernel::MemoryEfficient | AttentionKernel::Flash => None,
        };
        let (output, runs) = self.kept_result(bytes, Category::Activation);
        // Only backward needs the sums of rows; one kernel writes them always.
        let has_row_sums = records || kernel == AttentionKernel::Flash;
        let row_sums =
            has_row_sums.then(|| self.kept_result(self.row_sum_bytes(&shape, kernel), Category::Activation).0);
        let seeds = match kernel {
            AttentionKernel::Flash => Some(self.flash_seeds(&shape, drops, runs)),
            AttentionKernel::Cudnn if runs => {
                self.scratch(scratch::CUDNN_FORWARD, output);
                seeds
            }
            AttentionKernel::MemoryEfficient if runs => {
                self.efficient_sums(&shape, output);
                seeds
            }
            AttentionKernel::Cudnn | AttentionKernel::MemoryEfficient => seeds,
        };
        let work = self.attention_work(&shape, false);
        match query == key {
            _ if !runs => {}
            true => self.work(work, [query, output]),
            false => self.work(work, [query, key, value, output]),
        }
        if records && let Some(row_sums) = row_sums {
            self.save(row_sums);
            self.save_heads(output, bytes, shape.heads);
            if let Some([seed, offset]) = seeds {
                let in_order = if kernel == AttentionKernel::Flash { [seed, offset] } else { [offset, seed] };
                in_order.into_iter().for_each(|tensor| self.save(tensor));
            }
            if let Some(mask) = mask {
                self.save(mask);
            }
        }
        for tensor in row_sums.into_iter().chain(seeds.into_iter().flatten()) {
            self.release(tensor);
        }
        self.output(output, number, records, operation, edges)
    }

    /// Saves heads with these bytes in the order of tokens, seen head by head: a view, unless there is one head in a tensor
    /// of its own.
    fn save_heads(&mut self, tensor: Tensor, bytes: u64, heads: u32) {
        match self.is_reordered(heads) || self.bytes(tensor) != bytes {
            true => self.save_view(tensor, bytes),
            false => self.save(tensor),
        }
    }

    /// The gradients of queries, keys and values.
    pub(crate) fn attention_backward(
        &mut self,
        saved: &UnpackedTensors,
        shape: AttentionShape,
        kernel: AttentionKernel,
        incoming: Tensor,
    ) -> Gradients {
        // Flash attention takes its output token by token; from the host it comes head by head.
        let is_copied = kernel == AttentionKernel::Flash && saved.is_from_host && self.is_reordered(shape.heads);
        let output = is_copied.then(|| self.copied_gradient(self.bytes(incoming), incoming));
        let gradients = self.attention_bytes(&shape).map(|bytes| self.temporary(bytes));
        self.run_attention_backward(saved, &shape, kernel, [incoming, gradients[0]]);
        if let Some(output) = output {
            self.release(output);
        }
        gradients.map(Some)
    }

    /// The same, with the gradient of the mask for every sequence, which goes to its place.
    pub(crate) fn masked_attention_backward(
        &mut self,
        saved: &UnpackedTensors,
        shape: AttentionShape,
        mask: Option<GradientPlace>,
        incoming: Tensor,
    ) -> Gradients {
        let gradients = self.attention_bytes(&shape).map(|bytes| self.temporary(bytes));
        if let Some(place) = mask {
            let columns = round_up(u64::from(self.graph.length), MASK_GRADIENT_ALIGNMENT);
            let numbers = self.tokens() * columns * u64::from(shape.heads);
            let of_mask = self.temporary(numbers * shape.number.bytes());
            self.graph.gradients[place as usize] = Some(of_mask);
        }
        let kernel = AttentionKernel::of(shape.number, mask.is_some());
        self.run_attention_backward(saved, &shape, kernel, [incoming, gradients[0]]);
        gradients.map(Some)
    }

    /// The sum of a mask's gradients over all sequences.
    pub(crate) fn expand_mask_backward(&mut self, incoming: Tensor) -> Tensor {
        let Some(sequences) = self.several_sequences() else { return self.retain(incoming) };
        let bytes = self.bytes(incoming);
        // The incoming rows may be longer than those of the mask.
        let (length, longer) = (u64::from(self.graph.length), MASK_GRADIENT_ALIGNMENT);
        let sum = self.temporary(bytes / u64::from(sequences) / round_up(length, longer) * length);
        self.work(Work::Reduction { bytes }, [incoming, sum]);
        sum
    }

    /// Runs the kernel of backward between the scratch memory that it needs.
    fn run_attention_backward(
        &mut self,
        saved: &UnpackedTensors,
        shape: &AttentionShape,
        kernel: AttentionKernel,
        [incoming, of_query]: [Tensor; 2],
    ) {
        if kernel == AttentionKernel::Flash {
            return self.run_flash_backward(saved, shape, [incoming, of_query]);
        }
        let bytes = self.bytes(incoming);
        let (sequences_by_heads, length, head_width) = (
            u64::from(self.graph.sequences) * u64::from(shape.heads),
            u64::from(self.graph.length),
            u64::from(shape.head_width),
        );
        let of_rows = sequences_by_heads * length * NumberFormat::Single.bytes();
        let memory_efficient = scratch::memory_efficient_backward(sequences_by_heads, length, head_width, shape.number);
        let (row_products, workspace) = match (kernel, shape.number) {
            (AttentionKernel::MemoryEfficient, NumberFormat::Single) => {
                // The row sums of gradient times output, made by plain operators.
                let product = self.temporary(bytes);
                let sums = self.temporary(of_rows);
                let is_reordered = self.is_reordered(shape.heads);
                let by_head = if is_reordered { self.temporary(of_rows) } else { self.retain(sums) };
                self.elementwise(3 * bytes, [incoming, product]);
                self.work(Work::Reduction { bytes }, [product, sums]);
                self.release_all([sums, product]);
                (Some(by_head), memory_efficient)
            }
            (AttentionKernel::MemoryEfficient, NumberFormat::Half) => (Some(self.temporary(of_rows)), memory_efficient),
            (AttentionKernel::Cudnn | AttentionKernel::Flash, _) => {
                (None, scratch::cudnn_backward(sequences_by_heads, length, head_width))
            }
        };
        let workspace = self.alloc(workspace, Category::Workspace);
        let inputs = saved.operand(SAVED_INPUTS, incoming);
        let row_sums = saved.operand(SAVED_ROW_SUMS, incoming);
        self.work(self.attention_work(shape, true), [incoming, inputs, row_sums, of_query]);
        if let Some(sums) = row_products {
            self.release(sums);
        }
        self.release(workspace);
    }

    /// Memory-efficient attention to wide heads adds up its output in single precision first
    /// (`kNeedsOutputAccumulatorBuffer`).
    fn efficient_sums(&mut self, shape: &AttentionShape, output: Tensor) {
        const MOST_IN_REGISTERS: u32 = 128;
        if shape.number == NumberFormat::Half && shape.head_width > MOST_IN_REGISTERS {
            self.scratch(self.rows(shape.heads * shape.head_width, NumberFormat::Single), output);
        }
    }

    /// The random state that flash attention keeps even without dropout, beside an unused tensor (`mha_fwd`). A few long
    /// sequences are divided between thread blocks, whose results are added up.
    fn flash_seeds(&mut self, shape: &AttentionShape, drops: bool, runs: bool) -> [Tensor; 2] {
        let length = u64::from(self.graph.length);
        let heads = u64::from(self.graph.sequences) * u64::from(shape.heads);
        let splits = if drops { 1 } else { scratch::flash_splits(heads, length, shape.head_width.into()) };
        let parts = (runs && splits > 1).then(|| {
            let of_row = [1, scratch::flash_head_width(shape.head_width.into())];
            of_row.map(|width| {
                self.alloc(splits * heads * length * width * NumberFormat::Single.bytes(), Category::Workspace)
            })
        });
        let own_state = (runs && drops).then(|| self.temporary(2 * SEED));
        let state = (!drops).then(|| self.kept_result(2 * SEED, Category::Activation).0);
        let unused = self.kept_result(SEED, Category::Activation).0;
        for part in parts.into_iter().flatten() {
            self.release(part);
        }
        let state = state.unwrap_or_else(|| self.kept_result(2 * SEED, Category::Activation).0);
        own_state.into_iter().for_each(|own| self.release(own));
        [state, unused]
    }

    /// Runs flash attention's backward (`mha_bwd`): gradients of shared keys and values are made for every head first.
    fn run_flash_backward(
        &mut self,
        saved: &UnpackedTensors,
        shape: &AttentionShape,
        [incoming, of_query]: [Tensor; 2],
    ) {
        let heads = u64::from(self.graph.sequences) * u64::from(shape.heads);
        let rows = scratch::flash_backward_rows(self.graph.length.into());
        let width = scratch::flash_head_width(shape.head_width.into());
        let single = NumberFormat::Single.bytes();
        let row_products = self.temporary(heads * rows * single);
        let sums = self.alloc(heads * rows * width * single, Category::Workspace);
        let of_all_heads = self.rows(shape.heads * shape.head_width, shape.number);
        let is_shared = shape.key_value_heads < shape.heads;
        let by_head = is_shared.then(|| [(); 2].map(|()| self.temporary(of_all_heads)));
        let inputs = saved.operand(SAVED_INPUTS, incoming);
        let row_sums = saved.operand(SAVED_ROW_SUMS, incoming);
        self.work(self.attention_work(shape, true), [incoming, inputs, row_sums, of_query]);
        for tensor in by_head.into_iter().flatten() {
            self.release(tensor);
        }
        self.release_all([sums, row_products]);
    }

    /// Queries, keys and values as views of one tensor; their gradients are joined again.
    fn split(&mut self, query_key_value: Variable) -> [GradientEdge; MOST_EDGES] {
        let operation = GraphOperation::SplitThree { bytes: self.bytes(query_key_value.tensor) };
        let place = self.record(operation, &[query_key_value.edge()], MOST_EDGES as u8);
        [0, 1, 2].map(|part| place.map_or(GradientEdge::None, |place| GradientEdge::Variable(place + part)))
    }

    /// Queries, keys and values as variables of their own, of one size.
    pub(crate) fn split_in_three(&mut self, query_key_value: Variable) -> [Variable; MOST_EDGES] {
        let part = self.bytes(query_key_value.tensor) / MOST_EDGES as u64;
        self.split_in_parts(query_key_value, [part; MOST_EDGES])
    }

    /// Queries, keys and values as variables of their own, of these sizes.
    pub(crate) fn split_in_parts(
        &mut self,
        query_key_value: Variable,
        parts: [u64; MOST_EDGES],
    ) -> [Variable; MOST_EDGES] {
        let records = self.records(query_key_value.needs_gradient());
        let operation = GraphOperation::SplitThree { bytes: self.bytes(query_key_value.tensor) };
        let place = records.then(|| self.record(operation, &[query_key_value.edge()], MOST_EDGES as u8));
        [0, 1, 2].map(|number| Variable {
            origin: match place {
                None => VariableOrigin::Constant,
                Some(None) => VariableOrigin::Recomputed,
                Some(Some(place)) => VariableOrigin::Recorded(place + number),
            },
            part: Some(parts[number as usize]),
            ..query_key_value
        })
    }

    /// One tensor of three gradients, with this many bytes.
    pub(crate) fn split_backward(&mut self, bytes: u64, parts: [Tensor; MOST_EDGES]) -> Tensor {
        let joined = self.temporary(bytes);
        self.elementwise(2 * bytes, [parts[0], parts[1], parts[2], joined]);
        joined
    }

    fn row_sum_bytes(&self, shape: &AttentionShape, kernel: AttentionKernel) -> u64 {
        let length = u64::from(self.graph.length);
        let length =
            if kernel == AttentionKernel::MemoryEfficient { round_up(length, ROW_SUM_PADDING) } else { length };
        u64::from(self.graph.sequences) * u64::from(shape.heads) * length * NumberFormat::Single.bytes()
    }

    /// Bytes of queries, keys and values.
    pub(crate) fn attention_bytes(&self, shape: &AttentionShape) -> [u64; MOST_EDGES] {
        [shape.heads, shape.key_value_heads, shape.key_value_heads]
            .map(|heads| self.rows(heads * shape.head_width, shape.number))
    }

    fn attention_work(&self, shape: &AttentionShape, backward: bool) -> Work {
        let keys = self.graph.cache.as_ref().map(|cache| cache.tokens.next_multiple_of(KEYS_STEP));
        Work::Attention {
            batch: self.graph.sequences,
            heads: shape.heads,
            queries: self.graph.length,
            keys: keys.unwrap_or(self.graph.length),
            head_width: shape.head_width,
            dtype: self.plan.precision.of_attention(shape.number),
            backward,
            causal: shape.is_causal && self.graph.length > 1,
        }
    }
}

impl TensorMachine {
    /// Attention by plain operators (`_scaled_dot_product_attention_math`), in single precision. The result is in the order
    /// of heads and has the format of the queries.
    pub(crate) fn math_attention(&mut self, inputs: [Variable; 3], shape: AttentionShape, drops: bool) -> Variable {
        let [query, key, value] = inputs.map(|input| self.in_format(input, NumberFormat::Single));
        let scaled_query = self.scale(query);
        let mask = shape.is_causal.then(|| self.causal_mask());
        let of_query = self.bytes(scaled_query.tensor);
        let [all_keys, all_values] = [key, value].map(|heads| self.heads_of_all(heads, &shape, of_query));
        let scaled_keys = self.scale(all_keys);
        // Heads that are repeated are in the order of heads.
        let is_shared = shape.key_value_heads < shape.heads;
        let is_scattered = self.is_scattered(shape.heads);
        let by_head = self.by_head(scaled_query, is_scattered);
        let by_column = self.by_head(scaled_keys, is_scattered && !is_shared);
        let of_scores = of_query / u64::from(shape.head_width) * u64::from(self.graph.length);
        let views = [!is_scattered && self.is_reordered(shape.heads), !is_scattered || is_shared];
        let scores = self.batched_product([by_head, by_column], views, of_scores);
        self.release_all([by_head.tensor, by_column.tensor, scaled_keys.tensor]);
        let scores = mask.map_or(scores, |mask| self.masked_scores(scores, mask));
        let mut shares = self.safe_softmax(scores);
        self.release(scores.tensor);
        if drops {
            let kept = self.dropout(shares);
            self.release(shares.tensor);
            shares = kept;
        }
        // The shares are a second result, in the format of the first.
        let is_narrow = inputs[0].number == NumberFormat::Half;
        let narrow_shares = is_narrow.then(|| self.temporary(of_scores / 2));
        let values_by_head = self.by_head(all_values, is_scattered && !is_shared);
        let is_view = values_by_head.part.is_some() || (!is_scattered && !is_shared && self.is_reordered(shape.heads));
        let attended = self.batched_product([shares, values_by_head], [false, is_view], of_query);
        self.release(values_by_head.tensor);
        let attended = if is_scattered { self.reordered(attended) } else { attended };
        let result = self.in_format(attended, inputs[0].number);
        self.release_all([attended.tensor, shares.tensor, all_values.tensor, all_keys.tensor]);
        self.release(scaled_query.tensor);
        let inputs = [query, key, value].map(|input| input.tensor);
        for tensor in mask.into_iter().chain(inputs).chain(narrow_shares) {
            self.release(tensor);
        }
        result
    }

    /// The result of attention in the order of tokens: a copy, unless there is one head.
    pub(crate) fn by_token(&mut self, attended: Variable, heads: u32) -> Variable {
        if self.is_reordered(heads) {
            return self.contiguous(attended);
        }
        self.retain(attended.tensor);
        attended
    }

    /// Whether the order of heads and the order of tokens differ.
    pub(crate) fn is_reordered(&self, heads: u32) -> bool {
        heads > 1 && self.graph.length > 1
    }

    /// Whether a product for each head needs a copy of heads that are in the order of tokens: a view of one sequence, or
    /// of one head, is enough (`expand` and `reshape` in `matmul`).
    fn is_scattered(&self, heads: u32) -> bool {
        self.is_reordered(heads) && self.graph.sequences > 1
    }

    /// Heads in the order that a product for each head takes: a copy, or one more reference.
    fn by_head(&mut self, input: Variable, is_copied: bool) -> Variable {
        if is_copied {
            return self.contiguous(input);
        }
        self.retain(input.tensor);
        input
    }

    /// Keys or values for every head: repeated where heads share them.
    fn heads_of_all(&mut self, heads: Variable, shape: &AttentionShape, bytes: u64) -> Variable {
        if shape.key_value_heads < shape.heads {
            return self.repeat_heads(heads, bytes);
        }
        self.retain(heads.tensor);
        heads
    }

    /// Scores plus a mask: in place, or in a new tensor where a dispatch mode sees every operator, as that of a selective
    /// checkpoint does (`areAnyTensorSubclassLike`). Releases the scores in the latter case.
    fn masked_scores(&mut self, scores: Variable, mask: Tensor) -> Variable {
        let is_seen =
            self.plan.techniques.keeps_products && matches!(self.saving, SavingMode::Drop(_) | SavingMode::Collect(_));
        if !is_seen {
            self.elementwise(2 * self.bytes(scores.tensor), [mask, scores.tensor]);
            return scores;
        }
        let masked = self.shift(scores);
        self.release(scores.tensor);
        masked
    }

    /// Zeros for earlier tokens, and minus infinity for later ones.
    fn causal_mask(&mut self) -> Tensor {
        let of_number = NumberFormat::Single.bytes();
        let pairs = u64::from(self.graph.length) * u64::from(self.graph.length);
        let ones = self.temporary(pairs);
        let is_earlier = self.temporary(pairs);
        self.release(ones);
        let constants = [(); 2].map(|()| self.temporary(of_number));
        let mask = self.temporary(pairs * of_number);
        self.elementwise(pairs * (1 + of_number), [is_earlier, mask]);
        self.release_all(constants);
        self.release(is_earlier);
        mask
    }

    /// Keys or values, once for every head that shares them, with this many bytes.
    fn repeat_heads(&mut self, heads: Variable, bytes: u64) -> Variable {
        let repeated = self.alloc(bytes, Category::Activation);
        let of_heads = self.size(heads);
        self.elementwise(bytes + of_heads, [heads.tensor, repeated]);
        self.output_of(repeated, heads.number, GraphOperation::RepeatHeads { bytes: of_heads }, &[heads])
    }

    /// A key or a value that all heads share, seen as one for each of them: a view without a copy (`expand`).
    fn one_head_for_all(&mut self, head: Variable, bytes: u64) -> Variable {
        let operation = GraphOperation::RepeatHeads { bytes: self.size(head) };
        let tensor = self.retain(head.tensor);
        Variable { part: Some(bytes), ..self.output_of(tensor, head.number, operation, &[head]) }
    }

    /// The softmax of every row; rows without any number would be zeros.
    fn safe_softmax(&mut self, scores: Variable) -> Variable {
        let bytes = self.bytes(scores.tensor);
        let shares = self.alloc(bytes, Category::Activation);
        self.elementwise(2 * bytes, [scores.tensor, shares]);
        self.save_for(&[scores], [shares]);
        let pairs = bytes / scores.number.bytes();
        let is_masked = self.temporary(pairs);
        let is_empty = self.temporary(pairs / u64::from(self.graph.length));
        let zero = self.temporary(scores.number.bytes());
        self.elementwise(bytes + pairs, [scores.tensor, is_masked, is_empty]);
        self.release_all([zero, is_empty, is_masked]);
        self.output_of(shares, scores.number, GraphOperation::SoftMax, &[scores])
    }

    /// A product for every head, with this many bytes, of operands that may be views of other tensors.
    fn batched_product(&mut self, operands: [Variable; 2], views: [bool; 2], bytes: u64) -> Variable {
        let [left, right] = operands;
        // Each is saved for the gradient of the other.
        for (place, other) in [(1, left), (0, right)] {
            if !self.records(other.needs_gradient()) {
                continue;
            }
            let saved = operands[place];
            match views[place] {
                true => self.save_view(saved.tensor, self.size(saved)),
                false => self.save(saved.tensor),
            }
        }
        let of_operands = [left, right].map(|operand| self.size(operand));
        let (output, runs) = self.kept_result(bytes, Category::Activation);
        if runs {
            self.ensure_matrix_workspace();
            self.elementwise(of_operands[0] + of_operands[1] + bytes, [left.tensor, right.tensor, output]);
        }
        let operation = GraphOperation::BatchedProduct { bytes: of_operands };
        self.output_of(output, left.number, operation, &[left, right])
    }

    /// The gradients of both operands; that of the second comes first.
    pub(crate) fn batched_product_backward(
        &mut self,
        saved: &UnpackedTensors,
        bytes: [u64; 2],
        incoming: Tensor,
    ) -> Gradients {
        let mut gradients = [None; MOST_EDGES];
        for place in [1, 0] {
            if saved.edges[place].is_needed() {
                let gradient = self.temporary(bytes[place]);
                self.ensure_matrix_workspace();
                let traffic = self.bytes(incoming) + bytes[0] + bytes[1];
                let other = if saved.edges[0].is_needed() { place } else { 0 };
                self.elementwise(traffic, [incoming, saved.operand(other, incoming), gradient]);
                gradients[place] = Some(gradient);
            }
        }
        gradients
    }

    /// The sum over the heads that share a key or a value.
    pub(crate) fn repeat_heads_backward(&mut self, bytes: u64, incoming: Tensor) -> Tensor {
        let sum = self.temporary(bytes);
        self.work(Work::Reduction { bytes: self.bytes(incoming) }, [incoming, sum]);
        sum
    }
}

impl TensorMachine {
    /// A number for every head and pair of tokens, from a table with a row per bucket of distances. The result is a view
    /// with the heads first.
    pub(crate) fn position_bias(&mut self, table: WeightId, heads: u32, is_bidirectional: bool) -> Variable {
        let length = u64::from(self.graph.length);
        let (of_tokens, of_pairs) = (INDEX * length, INDEX * length * length);
        let range = self.temporary(of_tokens);
        let queries = self.replaced(range, of_tokens);
        let keys = self.temporary(of_tokens);
        let distances = self.temporary(of_pairs);
        self.elementwise(of_pairs, [queries, keys, distances]);
        let buckets = self.distance_buckets(distances, is_bidirectional);
        let lookup = Lookup { count: length * length, width: heads, is_expanded: false, is_permuted: true };
        let bias = self.look_up(table, buckets, lookup);
        self.release_all([queries, keys, distances, buckets]);
        bias
    }

    /// The bucket of every distance: near ones have their own, far ones share one by their logarithm.
    fn distance_buckets(&mut self, distances: Tensor, is_bidirectional: bool) -> Tensor {
        let of_pairs = self.bytes(distances);
        let (flags, numbers) = (of_pairs / INDEX, of_pairs / INDEX * NumberFormat::Single.bytes());
        let mut half = None;
        let first = self.temporary(if is_bidirectional { flags } else { of_pairs });
        let lengths = if is_bidirectional {
            // Distances to later tokens have the second half of the buckets.
            let is_later = self.replaced(first, of_pairs);
            let scaled = self.replaced(is_later, of_pairs);
            half = Some(self.replaced(scaled, of_pairs));
            self.temporary(of_pairs)
        } else {
            let smaller = self.replaced(first, of_pairs);
            self.replaced(smaller, of_pairs)
        };
        let is_near = self.temporary(flags);
        let mut far = self.temporary(numbers);
        for _ in 0..4 {
            // A quotient, the logarithm, a quotient and a product.
            far = self.replaced(far, numbers);
        }
        let far = self.replaced(far, of_pairs);
        let far = self.replaced(far, of_pairs);
        let limit = self.temporary(of_pairs);
        let limited = self.temporary(of_pairs);
        self.release_all([limit, far]);
        let chosen = self.temporary(of_pairs);
        self.elementwise(3 * of_pairs, [is_near, lengths, limited, chosen]);
        let buckets = match half {
            Some(half) => {
                self.release(chosen);
                half
            }
            None => self.replaced(chosen, of_pairs),
        };
        self.release_all([lengths, is_near, limited]);
        buckets
    }

    /// A bias as a contiguous mask. A causal one has the least number at later tokens.
    pub(crate) fn bias_mask(&mut self, bias: Variable, is_causal: bool) -> Variable {
        if !is_causal {
            return self.contiguous(bias);
        }
        let length = u64::from(self.graph.length);
        let ranges = [(); 2].map(|()| self.temporary(INDEX * length));
        let is_earlier = self.temporary(length * length);
        self.elementwise(length * length, [ranges[0], ranges[1], is_earlier]);
        self.release_all(ranges);
        self.save_for(&[bias], [is_earlier]);
        let constant = bias.number.bytes();
        let least = self.temporary(constant);
        let bytes = self.bytes(bias.tensor);
        let chosen = self.temporary(bytes);
        self.elementwise(2 * bytes, [is_earlier, bias.tensor, chosen]);
        let chosen = self.output_of(chosen, bias.number, GraphOperation::Choose { constant }, &[bias]);
        self.release(least);
        let mask = self.contiguous(chosen);
        self.release_all([is_earlier, chosen.tensor]);
        mask
    }

    /// The gradient, with zeros where the constant was chosen.
    pub(crate) fn choose_backward(&mut self, saved: &UnpackedTensors, constant: u64, incoming: Tensor) -> Tensor {
        let zero = self.temporary(constant);
        let bytes = self.bytes(incoming);
        let gradient = self.temporary(bytes);
        self.elementwise(2 * bytes, [saved.operand(0, incoming), incoming, gradient]);
        self.release(zero);
        gradient
    }

    /// Zeros for every head and pair of tokens. They need a gradient where blocks are checkpointed, as transformers
    /// has it.
    pub(crate) fn zero_bias(&mut self, heads: u32, number: NumberFormat) -> Variable {
        let length = u64::from(self.graph.length);
        let zeros = self.alloc(u64::from(heads) * length * length * number.bytes(), Category::Activation);
        let bias = Variable::constant(zeros, number);
        if self.plan.techniques.checkpoint_every.is_some() { self.with_gradient(bias) } else { bias }
    }

    /// A new tensor made from another one, which is released.
    fn replaced(&mut self, before: Tensor, bytes: u64) -> Tensor {
        let after = self.temporary(bytes);
        self.elementwise(2 * bytes, [before, after]);
        self.release(before);
        after
    }
}
