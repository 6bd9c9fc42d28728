//! What cuDNN's kernels for convolutions take for the time of one call, on a GPU of Hopper's kind.
//!
//! Which kernel cuDNN picks for a shape is its secret, so the choices are read off recordings of ResNet-50 with PyTorch
//! 2.11, 64 images of 224 x 224. What a choice takes follows from the shape: kernels that want other layouts take copies of
//! images and filter, kernels that share one filter's gradient out take a part for each. Other batches and images are
//! given the same choices.

use super::super::precision::Number;
use oomph_base::MIB;

/// The three computations of a convolution.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Forward,
    InputGradient,
    FilterGradient,
}

/// The sizes of one convolution, in numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    pub(super) images: u64,
    pub(super) inputs: u64,
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) filter: u64,
}

/// What one kernel takes.
#[derive(Clone, Copy, Debug)]
struct Scratch {
    copies: Copies,
    /// Copies have so many channels, whatever the images have.
    padded_channels: Option<u64>,
    parts: Parts,
    /// Descriptors, counters, alignment.
    rest: u64,
}

/// What is brought into another layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copies {
    Nothing,
    /// Input and output.
    Images,
    InputAndFilter,
    ImagesAndFilter,
}

/// Parts of the filter's gradient, in single precision, that are summed up at the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Parts {
    Fixed(u64),
    OneForEachImage,
}

const fn scratch(copies: Copies, rest: u64) -> Scratch {
    Scratch { copies, padded_channels: None, parts: Parts::Fixed(0), rest }
}

const fn plain(rest: u64) -> Scratch {
    scratch(Copies::Nothing, rest)
}

const fn images(rest: u64) -> Scratch {
    scratch(Copies::Images, rest)
}

const fn all(rest: u64) -> Scratch {
    scratch(Copies::ImagesAndFilter, rest)
}

const fn by_image(rest: u64) -> Scratch {
    Scratch { parts: Parts::OneForEachImage, ..plain(rest) }
}

impl Scratch {
    const fn parts(self, count: u64) -> Scratch {
        Scratch { parts: Parts::Fixed(count), ..self }
    }

    const fn padded(self, channels: u64) -> Scratch {
        Scratch { padded_channels: Some(channels), ..self }
    }

    fn bytes(&self, extent: &Extent, number: Number) -> u64 {
        let padded = |numbers: u64| self.padded_channels.map_or(numbers, |channels| numbers / extent.inputs * channels);
        let (input, filter) = (padded(extent.input), padded(extent.filter));
        let copied = match self.copies {
            Copies::Nothing => 0,
            Copies::Images => input + extent.output,
            Copies::InputAndFilter => input + filter,
            Copies::ImagesAndFilter => input + extent.output + filter,
        };
        let parts = match self.parts {
            Parts::Fixed(count) => count,
            Parts::OneForEachImage => extent.images,
        };
        copied * number.bytes() + parts * filter * Number::Single.bytes() + self.rest
    }
}

/// Which kernels a shape gets, in both formats: forward, gradient of the input, gradient of the filter.
struct Choice {
    inputs: u32,
    outputs: u32,
    kernel: u32,
    stride: u32,
    single: [Scratch; 3],
    half: [Scratch; 3],
}

const fn choice(shape: [u32; 4], single: [Scratch; 3], half: [Scratch; 3]) -> Choice {
    let [inputs, outputs, kernel, stride] = shape;
    Choice { inputs, outputs, kernel, stride, single, half }
}

/// A buffer of 8 MiB for parts of whatever size.
const POOL: u64 = 8 * MIB;

#[rustfmt::skip]
static CHOICES: &[Choice] = &[
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
    choice([256, 512, 1, 2], [scratch(Copies::InputAndFilter, 16), images(147), images(655).parts(16)], [images(147), images(147), images(559).parts(3)]),
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

/// The place of a shape's kernels, for [`scratch_bytes`].
pub(super) fn choice_for(inputs: u32, outputs: u32, kernel: u32, stride: u32) -> Option<u8> {
    let wanted = (inputs, outputs, kernel, stride);
    let place = CHOICES.iter().position(|row| (row.inputs, row.outputs, row.kernel, row.stride) == wanted);
    place.map(|place| place as u8)
}

/// What the chosen kernel takes.
pub(super) fn scratch_bytes(choice: u8, direction: Direction, extent: &Extent, number: Number) -> u64 {
    let row = &CHOICES[usize::from(choice)];
    let kernels = match number {
        Number::Single => &row.single,
        Number::Half => &row.half,
    };
    kernels[direction as usize].bytes(extent, number)
}

/// Which convolutions have tried all their kernels; nothing where none does (`cudnn.benchmark = False`).
#[derive(Clone, Debug, Default)]
pub(in super::super) struct KernelSearch(Option<[[bool; 3]; CHOICES.len()]>);

impl KernelSearch {
    /// Every convolution tries all its kernels at its first call.
    pub(super) fn exhaustive() -> KernelSearch {
        KernelSearch(Some([[false; 3]; CHOICES.len()]))
    }

    /// Whether this one has to try them now; asked again, it has not.
    pub(super) fn begins(&mut self, choice: u8, direction: Direction) -> bool {
        match &mut self.0 {
            Some(done) => !std::mem::replace(&mut done[usize::from(choice)][direction as usize], true),
            None => false,
        }
    }
}
