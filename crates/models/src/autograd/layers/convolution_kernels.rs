//! The workspaces of cuDNN's convolution kernels on a Hopper GPU.
//!
//! cuDNN does not say which kernel it picks for a shape, so the choices are read off recordings of ResNet-50 with PyTorch
//! 2.11, 64 images of 224 x 224. The workspace of a choice follows from the shape: kernels for other layouts copy images
//! and filter; kernels that split the filter's gradient need one part per split. Other batches and image sizes get the
//! same choices.

use crate::autograd::techniques::NumberFormat;
use oomph_base::{Dtype, MIB, ProductRole, Work};

/// A convolution of square images with a square filter, padded so that only the stride makes images smaller.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConvolutionShape {
    inputs: u32,
    outputs: u32,
    kernel: u32,
    stride: u32,
    /// Rows, and columns, of an input image.
    side: u32,
    /// The row of the table of kernel choices.
    choice: u8,
}

/// The three computations of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ConvolutionPass {
    Forward,
    InputGradient,
    FilterGradient,
}

/// The sizes of one convolution over a batch, in numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConvolutionSizes {
    images: u64,
    inputs: u64,
    pub(crate) input: u64,
    pub(crate) output: u64,
    pub(crate) filter: u64,
}

impl ConvolutionShape {
    /// Nothing where cuDNN's choice for the shape is not known.
    pub(crate) fn new(shape: [u32; 4], side: u32) -> Option<ConvolutionShape> {
        let choice = CHOICES.iter().position(|row| row.shape == shape)?;
        let [inputs, outputs, kernel, stride] = shape;
        Some(ConvolutionShape { inputs, outputs, kernel, stride, side, choice: choice as u8 })
    }

    /// Rows, and columns, of an output image.
    pub(crate) fn output_side(&self) -> u32 {
        self.side.div_ceil(self.stride)
    }

    /// Numbers under the filter at one place.
    fn patch(&self) -> u32 {
        self.inputs * self.kernel * self.kernel
    }

    /// Numbers in the filter.
    pub(crate) fn filter(&self) -> u64 {
        u64::from(self.outputs) * u64::from(self.patch())
    }

    /// Its sizes for this many images.
    pub(crate) fn sizes(&self, images: u32) -> ConvolutionSizes {
        let images = u64::from(images);
        let pixels = |side: u32| u64::from(side) * u64::from(side);
        ConvolutionSizes {
            images,
            inputs: self.inputs.into(),
            input: images * u64::from(self.inputs) * pixels(self.side),
            output: images * u64::from(self.outputs) * pixels(self.output_side()),
            filter: self.filter(),
        }
    }

    /// The convolution as a matrix product with one row per output pixel.
    pub(crate) fn work(&self, sizes: &ConvolutionSizes, pass: ConvolutionPass, number: NumberFormat) -> Work {
        let (pixels, patch) = ((sizes.output / u64::from(self.outputs)) as u32, self.patch());
        let [m, n, k] = match pass {
            ConvolutionPass::Forward => [pixels, self.outputs, patch],
            ConvolutionPass::InputGradient => [pixels, patch, self.outputs],
            ConvolutionPass::FilterGradient => [self.outputs, patch, pixels],
        };
        // By default PyTorch lets cuDNN round single precision to tf32.
        let dtype = if number == NumberFormat::Single { Dtype::Tf32 } else { Dtype::Bf16 };
        Work::Gemm { m, n, k, batch: 1, dtype, role: ProductRole::Output }
    }

    /// The workspace of the chosen kernel.
    pub(crate) fn workspace(&self, sizes: &ConvolutionSizes, pass: ConvolutionPass, number: NumberFormat) -> u64 {
        let row = &CHOICES[usize::from(self.choice)];
        let kernels = match number {
            NumberFormat::Single => &row.single,
            NumberFormat::Half => &row.half,
        };
        kernels[pass as usize].bytes(sizes, number)
    }

    /// The workspace that all kernels share in a search: that of the one that writes out the patch of every pixel.
    pub(crate) fn search_workspace(&self, sizes: &ConvolutionSizes, number: NumberFormat) -> u64 {
        sizes.output / u64::from(self.outputs) * u64::from(self.patch()) * number.bytes()
    }
}

/// The workspace of the gradient of a filter whose strides are its sides, so that it cuts images of few channels into
/// patches: 16-bit kernels copy images and filter with eight channels. Read off one recording.
pub(crate) fn patch_filter_workspace(input: u64, output: u64, filter: u64, channels: u64, number: NumberFormat) -> u64 {
    const CHANNELS: u64 = 8;
    const REST: u64 = 272;
    match number {
        NumberFormat::Single => 0,
        NumberFormat::Half => ((input + filter) / channels * CHANNELS + output) * number.bytes() + REST,
    }
}

/// Which convolutions have tried all their kernels; nothing without a search (`cudnn.benchmark = False`).
#[derive(Clone, Debug, Default)]
pub(crate) struct KernelSearch(Option<[[bool; 3]; CHOICES.len()]>);

impl KernelSearch {
    /// Every convolution tries all its kernels at its first call.
    pub(crate) fn exhaustive() -> KernelSearch {
        KernelSearch(Some([[false; 3]; CHOICES.len()]))
    }

    /// Whether this convolution must try them now. The next answer for it is no.
    pub(crate) fn begins(&mut self, shape: &ConvolutionShape, pass: ConvolutionPass) -> bool {
        match &mut self.0 {
            Some(done) => !std::mem::replace(&mut done[usize::from(shape.choice)][pass as usize], true),
            None => false,
        }
    }
}

/// The workspace of one kernel.
#[derive(Clone, Copy, Debug)]
struct KernelScratch {
    copies: LayoutCopies,
    /// The number of channels of the copies, where it differs from that of the images.
    padded_channels: Option<u64>,
    parts: FilterParts,
    /// Descriptors, counters, alignment.
    rest: u64,
}

/// What is copied into another layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LayoutCopies {
    Nothing,
    /// Input and output.
    Images,
    InputAndFilter,
    ImagesAndFilter,
}

/// Parts of the filter's gradient, in single precision, that are summed up at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FilterParts {
    Fixed(u64),
    OneForEachImage,
}

const fn scratch(copies: LayoutCopies, rest: u64) -> KernelScratch {
    KernelScratch { copies, padded_channels: None, parts: FilterParts::Fixed(0), rest }
}

const fn plain(rest: u64) -> KernelScratch {
    scratch(LayoutCopies::Nothing, rest)
}

const fn images(rest: u64) -> KernelScratch {
    scratch(LayoutCopies::Images, rest)
}

const fn all(rest: u64) -> KernelScratch {
    scratch(LayoutCopies::ImagesAndFilter, rest)
}

const fn by_image(rest: u64) -> KernelScratch {
    KernelScratch { parts: FilterParts::OneForEachImage, ..plain(rest) }
}

impl KernelScratch {
    const fn parts(self, count: u64) -> KernelScratch {
        KernelScratch { parts: FilterParts::Fixed(count), ..self }
    }

    const fn padded(self, channels: u64) -> KernelScratch {
        KernelScratch { padded_channels: Some(channels), ..self }
    }

    fn bytes(&self, sizes: &ConvolutionSizes, number: NumberFormat) -> u64 {
        let padded = |numbers: u64| self.padded_channels.map_or(numbers, |channels| numbers / sizes.inputs * channels);
        let (input, filter) = (padded(sizes.input), padded(sizes.filter));
        let copied = match self.copies {
            LayoutCopies::Nothing => 0,
            LayoutCopies::Images => input + sizes.output,
            LayoutCopies::InputAndFilter => input + filter,
            LayoutCopies::ImagesAndFilter => input + sizes.output + filter,
        };
        let parts = match self.parts {
            FilterParts::Fixed(count) => count,
            FilterParts::OneForEachImage => sizes.images,
        };
        copied * number.bytes() + parts * filter * NumberFormat::Single.bytes() + self.rest
    }
}

/// The kernels for a shape, in both formats: forward, gradient of the input, gradient of the filter.
struct KernelChoice {
    /// Inputs, outputs, kernel, stride.
    shape: [u32; 4],
    single: [KernelScratch; 3],
    half: [KernelScratch; 3],
}

const fn choice(shape: [u32; 4], single: [KernelScratch; 3], half: [KernelScratch; 3]) -> KernelChoice {
    KernelChoice { shape, single, half }
}

/// A fixed buffer for parts.
const POOL: u64 = 8 * MIB;

#[rustfmt::skip]
static CHOICES: &[KernelChoice] = &[
    // The stem: three channels are padded to four, or to eight of half the width.
    choice([3, 64, 7, 2], [all(16), plain(0), all(144).padded(4).parts(120)], [all(16).padded(8), plain(0), all(144).padded(8).parts(61)]),
    // Stage by stage; within each: narrow, spatial, widen, the shortcut, and narrow again from the wide.
    choice([64, 64, 1, 1], [plain(400), plain(400), by_image(0)], [plain(0), plain(0), by_image(0)]),
    choice([64, 64, 3, 1], [all(147), all(147), all(679).parts(14)], [all(147), all(147), all(679).parts(13)]),
    choice([64, 256, 1, 1], [plain(400), plain(0), by_image(400)], [plain(272), plain(0), by_image(272)]),
    choice([256, 64, 1, 1], [plain(400), plain(400), by_image(400)], [plain(0), plain(272), by_image(0)]),
    choice([256, 128, 1, 1], [plain(400), plain(400), by_image(400)], [plain(272), plain(272), by_image(272)]),
    choice([128, 128, 3, 2], [all(147), all(147), all(679).parts(14)], [all(147), all(147), all(391).parts(4)]),
    choice([128, 512, 1, 1], [plain(400), plain(0), by_image(0)], [plain(0), plain(0), by_image(0)]),
    choice([256, 512, 1, 2], [scratch(LayoutCopies::InputAndFilter, 16), images(147), images(655).parts(16)], [images(147), images(147), images(559).parts(3)]),
    choice([512, 128, 1, 1], [plain(400), plain(400), by_image(0)], [plain(0), plain(0), by_image(0)]),
    choice([128, 128, 3, 1], [all(147), all(147), all(679).parts(14)], [all(147), all(147), all(391).parts(4)]),
    choice([512, 256, 1, 1], [plain(400), plain(400), by_image(0)], [plain(0), plain(0), by_image(0)]),
    choice([256, 256, 3, 2], [all(POOL + 431), all(147), all(607).parts(3)], [all(16), all(147), all(16)]),
    choice([256, 1024, 1, 1], [plain(400), plain(400), by_image(0)], [plain(0), plain(0), images(303).parts(2)]),
    choice([512, 1024, 1, 2], [images(147), images(147), images(559).parts(4)], [images(147), images(147), images(16)]),
    choice([1024, 256, 1, 1], [plain(0), plain(400), by_image(0)], [plain(0), plain(0), images(303).parts(2)]),
    choice([256, 256, 3, 1], [all(POOL + 431), all(16), all(607).parts(3)], [all(16), all(16), all(16)]),
    choice([1024, 512, 1, 1], [plain(0), plain(400), images(559).parts(4)], [images(147), images(147), images(16)]),
    choice([512, 512, 3, 2], [all(16), all(147), all(POOL + 262_895)], [all(16), all(147), all(147)]),
    choice([512, 2048, 1, 1], [images(16), images(16), images(16)], [images(147), images(16), images(16)]),
    choice([1024, 2048, 1, 2], [images(147), images(147), images(16)], [images(147), images(147), images(16)]),
    choice([2048, 512, 1, 1], [images(16), images(147), images(POOL + 431)], [images(16), images(147), images(16)]),
    choice([512, 512, 3, 1], [all(16), all(16), all(POOL + 262_895)], [all(16), all(16), all(147)]),
];
