//! The network: a stem, four stages of bottleneck blocks with their shortcuts, and a classifier.
//!
//! Written as torchvision's Python is: which local lives how long decides when blocks die.

use super::{
    super::{
        graph::Value,
        machine::{Machine, Tensor},
        weights::{Declared, Linear, NormWeights, Split, WeightId},
    },
    convolution::Convolution,
    kernels,
    layers::{Activation, BatchNorm},
};
use oomph_trace::Category;

/// How much wider a block ends than its middle.
const EXPANSION: u32 = 4;
/// Widths of the middles of the four stages' blocks.
const WIDTHS: [u32; 4] = [64, 128, 256, 512];
/// Channels of an image that comes in.
pub(super) const COLOURS: u32 = 3;

/// A convolution and the norm behind it.
#[derive(Clone, Copy, Debug)]
struct Unit {
    convolution: Convolution,
    norm: BatchNorm,
}

/// Narrow, look around, widen; the shortcut adds what came in, brought to shape where it must be.
#[derive(Clone, Copy, Debug)]
struct Bottleneck {
    narrow: Unit,
    spatial: Unit,
    widen: Unit,
    shortcut: Option<Unit>,
}

/// See the [module](self).
#[derive(Clone, Debug)]
pub(super) struct Network {
    stem: Unit,
    blocks: Vec<Bottleneck>,
    head: Linear,
    activation: Activation,
}

impl Network {
    /// The network whose stages have so many blocks, for images of so many rows and columns, with its weights in the
    /// order in which torchvision declares them. Nothing where cuDNN's choice for a shape is not known.
    pub(super) fn declare(
        blocks_per_stage: [u32; 4],
        side: u32,
        classes: u32,
        activation: Activation,
    ) -> Option<(Network, Vec<Declared>)> {
        let mut list = Declaring::default();
        let stem = list.unit([COLOURS, WIDTHS[0], 7, 2], side)?;
        let mut side = stem.convolution.output_side().div_ceil(2);
        let (mut blocks, mut channels) = (Vec::new(), WIDTHS[0]);
        for (stage, (count, width)) in blocks_per_stage.into_iter().zip(WIDTHS).enumerate() {
            for place in 0..count {
                list.layer = Some(blocks.len() as u16);
                let stride = if place == 0 && stage > 0 { 2 } else { 1 };
                let narrow = list.unit([channels, width, 1, 1], side)?;
                let spatial = list.unit([width, width, 3, stride], side)?;
                let output_side = spatial.convolution.output_side();
                let widen = list.unit([width, EXPANSION * width, 1, 1], output_side)?;
                let shortcut = match place {
                    0 => Some(list.unit([channels, EXPANSION * width, 1, stride], side)?),
                    _ => None,
                };
                blocks.push(Bottleneck { narrow, spatial, widen, shortcut });
                (side, channels) = (output_side, EXPANSION * width);
            }
        }
        list.layer = None;
        let weight = list.declare(u64::from(channels) * u64::from(classes), true);
        let bias = Some(list.declare(classes.into(), true));
        let head = Linear { weight, bias, inputs: channels, outputs: classes, split: Split::Whole, adapter: None };
        Some((Network { stem, blocks, head, activation }, list.declared))
    }

    /// From images and the numbers of their classes to the loss.
    pub(super) fn loss(&self, machine: &mut Machine, images: Value, classes: Tensor) -> Value {
        let logits = self.forward(machine, images);
        let loss = machine.cross_entropy(logits, classes);
        machine.release(logits.tensor);
        loss
    }

    fn forward(&self, machine: &mut Machine, images: Value) -> Value {
        let stem = self.stem.apply(machine, images);
        let stem = machine.activate(stem, self.activation);
        let side = u64::from(self.stem.convolution.output_side().div_ceil(2));
        let numbers = u64::from(machine.graph.sequences) * u64::from(WIDTHS[0]) * side * side;
        let mut x = machine.max_pool(stem, numbers);
        machine.release(stem.tensor);
        for (place, block) in self.blocks.iter().enumerate() {
            machine.layer = Some(place as u16);
            let output = block.apply(machine, x, self.activation);
            machine.release(x.tensor);
            x = output;
        }
        machine.layer = None;
        let last_side = self.blocks.last().map_or(1, |block| u64::from(block.widen.convolution.output_side()));
        let pooled = machine.mean_pool(x, last_side * last_side);
        machine.release(x.tensor);
        let logits = machine.linear(pooled, self.head, Category::Activation);
        machine.release(pooled.tensor);
        logits
    }
}

impl Unit {
    fn apply(&self, machine: &mut Machine, input: Value) -> Value {
        let convolved = machine.convolve(input, self.convolution);
        let normed = machine.batch_norm(convolved, self.norm);
        machine.release(convolved.tensor);
        normed
    }
}

impl Bottleneck {
    fn apply(&self, machine: &mut Machine, input: Value, activation: Activation) -> Value {
        let narrow = self.narrow.apply(machine, input);
        let narrow = machine.activate(narrow, activation);
        let spatial = self.spatial.apply(machine, narrow);
        machine.release(narrow.tensor);
        let spatial = machine.activate(spatial, activation);
        let wide = self.widen.apply(machine, spatial);
        machine.release(spatial.tensor);
        let sum = match &self.shortcut {
            Some(shortcut) => {
                let identity = shortcut.apply(machine, input);
                let sum = machine.add_in_place(wide, identity);
                machine.release(identity.tensor);
                sum
            }
            None => machine.add_in_place(wide, input),
        };
        machine.activate(sum, activation)
    }
}

#[derive(Default)]
struct Declaring {
    declared: Vec<Declared>,
    layer: Option<u16>,
}

impl Declaring {
    /// A convolution from so many channels to so many, with this kernel and stride, and its norm.
    fn unit(&mut self, shape: [u32; 4], side: u32) -> Option<Unit> {
        /// Numbers of single precision that a 64-bit counter takes.
        const COUNTER: u64 = 2;
        let [inputs, outputs, kernel, stride] = shape;
        let kernels = kernels::choice_for(inputs, outputs, kernel, stride)?;
        let mut convolution = Convolution { weight: 0, inputs, outputs, kernel, stride, side, kernels };
        convolution.weight = self.declare(convolution.filter(), true);
        let [scale, shift] = [(); 2].map(|()| self.declare(outputs.into(), true));
        let running = [(); 2].map(|()| self.declare(outputs.into(), false));
        self.declare(COUNTER, false);
        let norm = BatchNorm { weights: NormWeights { scale, shift }, running, channels: outputs };
        Some(Unit { convolution, norm })
    }

    fn declare(&mut self, elements: u64, trainable: bool) -> WeightId {
        self.declared.push(Declared { elements, layer: self.layer, trainable, is_embedding: false });
        (self.declared.len() - 1) as WeightId
    }
}
