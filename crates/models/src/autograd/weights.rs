//! The weights: which there are, in the order in which the model declares them, and what belongs to each.

use super::{graph::Value, machine::Tensor, plan::Plan};
use oomph_trace::BlockSlot;

/// The place of a weight in the model's list.
pub(super) type WeightId = u32;

/// One weight and what belongs to it.
#[derive(Clone, Debug)]
pub(super) struct Weight {
    /// Where it lives on the device; nowhere while it is on the host.
    pub(super) tensor: Option<Tensor>,
    /// Where it lives on the host, if its home is there.
    pub(super) home: Option<BlockSlot>,
    /// This rank's part, if the whole is gathered only while it is used.
    pub(super) shard: Option<Tensor>,
    pub(super) elements: u64,
    pub(super) layer: Option<u16>,
    /// Frozen weights have no gradient and no optimizer state.
    pub(super) trainable: bool,
    pub(super) gradient: Option<Tensor>,
    /// This rank's part of the gradient, where the whole is scattered as soon as it is there.
    pub(super) gradient_shard: Option<Tensor>,
    /// The optimizer's state, from the first step on.
    pub(super) state: Vec<Tensor>,
    /// Whether the host keeps state for it.
    pub(super) has_host_state: bool,
    /// Its 16-bit copy, cast once for as long as autocast lasts.
    pub(super) cast: Option<Value>,
}

impl Weight {
    /// What the optimizer updates on this rank.
    pub(super) fn resident(&self) -> Option<Tensor> {
        self.tensor.or(self.shard)
    }

    /// What the optimizer reads on this rank.
    pub(super) fn resident_gradient(&self) -> Option<Tensor> {
        self.gradient.or(self.gradient_shard)
    }
}

/// What a weight is made of.
#[derive(Clone, Copy, Debug)]
pub(super) struct Declared {
    pub(super) elements: u64,
    pub(super) layer: Option<u16>,
    pub(super) trainable: bool,
    /// Whether it is looked up row by row, and may therefore stay on the host.
    pub(super) is_embedding: bool,
}

/// Scale and shift of a layer norm.
#[derive(Clone, Copy, Debug)]
pub(super) struct NormWeights {
    pub(super) scale: WeightId,
    pub(super) shift: WeightId,
}

/// A product with a weight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linear {
    pub(super) weight: WeightId,
    pub(super) bias: Option<WeightId>,
    pub(super) inputs: u32,
    pub(super) outputs: u32,
    pub(super) split: Split,
    /// Two thin trainable weights beside a frozen one.
    pub(super) adapter: Option<Adapter>,
}

/// How a product is shared between the ranks of a tensor-parallel group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Split {
    /// Not at all.
    Whole,
    /// Every rank has some outputs: gradients of the input are summed over ranks.
    Outputs,
    /// Every rank has some inputs: results are summed over ranks.
    Inputs,
}

/// Low-rank adaptation: the product goes through a narrow waist.
#[derive(Clone, Copy, Debug)]
pub(super) struct Adapter {
    pub(super) down: WeightId,
    pub(super) up: WeightId,
    pub(super) rank: u32,
}

/// The weights of one block.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockWeights {
    pub(super) norm_1: NormWeights,
    pub(super) query_key_value: Linear,
    pub(super) projection: Linear,
    pub(super) norm_2: NormWeights,
    /// Scores every expert for every token; nothing where there is one MLP only.
    pub(super) router: Option<Linear>,
    /// Of the MLP, or of the first expert.
    pub(super) up: Linear,
    pub(super) down: Linear,
    /// How many weights further the next expert's are.
    pub(super) weights_per_expert: WeightId,
}

impl Linear {
    /// The same product with weights that come so many places later.
    pub(super) fn later(self, places: WeightId) -> Linear {
        let adapter = self.adapter.map(|adapter| Adapter {
            down: adapter.down + places,
            up: adapter.up + places,
            rank: adapter.rank,
        });
        Linear { weight: self.weight + places, bias: self.bias.map(|bias| bias + places), adapter, ..self }
    }
}

/// Where in the list each layer's weights are. Models that are no transformers have a list only.
#[derive(Clone, Debug, Default)]
pub(super) struct Layout {
    pub(super) declared: Vec<Declared>,
    pub(super) tokens: WeightId,
    pub(super) positions: WeightId,
    pub(super) blocks: Vec<BlockWeights>,
    /// The last norm and the output head; the first stage of a pipeline has neither.
    pub(super) ending: Option<(NormWeights, Linear)>,
}

impl Layout {
    /// The weights of this rank.
    pub(super) fn of(plan: &Plan) -> Layout {
        let mut list = Declaring { plan, declared: Vec::new(), layer: None };
        let (width, context) = (plan.shape.width, plan.shape.context);
        let vocabulary = plan.local_vocabulary();
        let tokens = list.embedding(vocabulary, width);
        let positions = list.embedding(context, width);
        let blocks = (0..plan.local_layers())
            .map(|layer| {
                list.layer = u16::try_from(layer).ok();
                list.block()
            })
            .collect();
        list.layer = None;
        let ending = plan.has_ending().then(|| {
            let norm = list.norm(width);
            let split = if vocabulary == plan.shape.vocabulary { Split::Whole } else { Split::Outputs };
            let weight = list.declare(u64::from(vocabulary) * u64::from(width));
            (norm, Linear { weight, bias: None, inputs: width, outputs: vocabulary, split, adapter: None })
        });
        Layout { declared: list.declared, tokens, positions, blocks, ending }
    }
}

impl Layout {
    /// The places of a layer's weights in the list; those outside of the blocks come before the first and after the
    /// last.
    pub(super) fn weights_of(&self, layer: Option<u16>) -> impl Iterator<Item = usize> + use<> {
        let before = self.positions as usize + 1;
        let after = match self.ending {
            Some((norm, _)) => norm.scale as usize,
            None => self.declared.len(),
        };
        let per_block = (after - before) / self.blocks.len().max(1);
        let (first, second) = match layer {
            Some(layer) => {
                let start = before + usize::from(layer) * per_block;
                (start..start + per_block, 0..0)
            }
            None => (0..before, after..self.declared.len()),
        };
        first.chain(second)
    }
}

struct Declaring<'a> {
    plan: &'a Plan,
    declared: Vec<Declared>,
    layer: Option<u16>,
}

impl Declaring<'_> {
    fn block(&mut self) -> BlockWeights {
        let width = self.plan.shape.width;
        let ranks = self.plan.techniques.tensor_ranks;
        let (narrow, wide) = (width / ranks, 4 * width / ranks);
        let split = |split| if ranks == 1 { Split::Whole } else { split };
        let norm_1 = self.norm(width);
        let query_key_value = self.linear(width, 3 * narrow, split(Split::Outputs));
        let projection = self.linear(narrow, width, split(Split::Inputs));
        let norm_2 = self.norm(width);
        let router = self.plan.shape.mixture.map(|mixture| {
            let weight = self.declare(u64::from(width) * u64::from(mixture.experts));
            Linear { weight, bias: None, inputs: width, outputs: mixture.experts, split: Split::Whole, adapter: None }
        });
        let first = self.declared.len();
        let up = self.linear(width, wide, split(Split::Outputs));
        let down = self.linear(wide, width, split(Split::Inputs));
        let weights_per_expert = (self.declared.len() - first) as WeightId;
        for _ in 1..self.plan.shape.mixture.map_or(1, |mixture| mixture.experts) {
            self.linear(width, wide, split(Split::Outputs));
            self.linear(wide, width, split(Split::Inputs));
        }
        BlockWeights { norm_1, query_key_value, projection, norm_2, router, up, down, weights_per_expert }
    }

    fn norm(&mut self, width: u32) -> NormWeights {
        NormWeights { scale: self.declare(width.into()), shift: self.declare(width.into()) }
    }

    fn linear(&mut self, inputs: u32, outputs: u32, split: Split) -> Linear {
        let weight = self.declare(u64::from(inputs) * u64::from(outputs));
        let bias = Some(self.declare(outputs.into()));
        let adapter = self.plan.techniques.lora_rank.map(|rank| Adapter {
            down: self.declare_as(u64::from(inputs) * u64::from(rank), true),
            up: self.declare_as(u64::from(rank) * u64::from(outputs), true),
            rank,
        });
        Linear { weight, bias, inputs, outputs, split, adapter }
    }

    fn embedding(&mut self, rows: u32, width: u32) -> WeightId {
        let id = self.declare(u64::from(rows) * u64::from(width));
        self.declared[id as usize].is_embedding = true;
        id
    }

    fn declare(&mut self, elements: u64) -> WeightId {
        self.declare_as(elements, self.plan.techniques.lora_rank.is_none())
    }

    fn declare_as(&mut self, elements: u64, trainable: bool) -> WeightId {
        self.declared.push(Declared { elements, layer: self.layer, trainable, is_embedding: false });
        (self.declared.len() - 1) as WeightId
    }
}
