//! Convolutions without bias, as `torch.nn.Conv2d` makes them through cuDNN, and the pooling between them.

use super::{
    INDEX,
    convolution_kernels::{ConvolutionPass, ConvolutionShape},
};
use crate::autograd::{
    graph::{GradientEdge, Gradients, GraphOperation, MOST_EDGES, Tensor, Variable, WeightId},
    machine::TensorMachine,
    saving::UnpackedTensors,
    techniques::NumberFormat,
};
use oomph_base::Work;
use oomph_trace::Category;

/// A convolution and its filter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Convolution {
    pub(crate) weight: WeightId,
    pub(crate) shape: ConvolutionShape,
}

/// The places of what a convolution saves, in PyTorch's order.
const SAVED_INPUT: usize = 0;
const SAVED_WEIGHT: usize = 1;

impl TensorMachine {
    /// Every image with every filter.
    pub(crate) fn convolve(&mut self, images: Variable, convolution: Convolution) -> Variable {
        let Convolution { weight: id, shape } = convolution;
        let (weight, _) = self.product_weight(id);
        let input = self.cast_for_product(images);
        let number = input.number;
        let records = self.records(true);
        if records {
            self.save(input.tensor);
            if Some(weight.tensor) == self.weights[id as usize].tensor {
                self.save_weight(id, false);
            } else {
                self.save(weight.tensor);
            }
        }
        let output = self.alloc(shape.sizes(self.graph.sequences).output * number.bytes(), Category::Activation);
        self.run_kernel(&shape, number, ConvolutionPass::Forward, [input.tensor, weight.tensor, output]);
        let to_weight = match weight.edge() {
            GradientEdge::None => GradientEdge::Weight(id),
            edge => edge,
        };
        let operation = GraphOperation::Convolution(shape, number);
        let output = self.output(output, number, records, operation, &[input.edge(), to_weight]);
        if input.tensor != images.tensor {
            self.release(input.tensor);
        }
        output
    }

    /// The gradients of images and filter.
    pub(crate) fn convolution_backward(
        &mut self,
        saved: &UnpackedTensors,
        shape: ConvolutionShape,
        number: NumberFormat,
        incoming: Tensor,
    ) -> Gradients {
        let (input, weight) = (saved.operand(SAVED_INPUT, incoming), saved.operand(SAVED_WEIGHT, incoming));
        let sizes = shape.sizes(self.graph.sequences);
        let [to_input, to_weight, _] = saved.edges;
        let mut gradients = [None; MOST_EDGES];
        if to_input.is_needed() {
            let gradient = self.temporary(sizes.input * number.bytes());
            self.run_kernel(&shape, number, ConvolutionPass::InputGradient, [incoming, weight, gradient]);
            gradients[0] = Some(gradient);
        }
        let gradient = self.gradient_along(to_weight, sizes.filter * number.bytes());
        self.run_kernel(&shape, number, ConvolutionPass::FilterGradient, [incoming, input, gradient]);
        gradients[1] = Some(gradient);
        gradients
    }

    fn run_kernel(
        &mut self,
        shape: &ConvolutionShape,
        number: NumberFormat,
        pass: ConvolutionPass,
        operands: [Tensor; 3],
    ) {
        let sizes = shape.sizes(self.graph.sequences);
        let work = shape.work(&sizes, pass, number);
        if self.kernel_search.begins(shape, pass) {
            // PyTorch allocates the workspace twice, once to see that it can and once to measure, and then returns all
            // cached memory.
            let bytes = shape.search_workspace(&sizes, number);
            let tried = self.alloc(bytes, Category::Workspace);
            self.release(tried);
            let workspace = self.alloc(bytes, Category::Workspace);
            self.work(work, operands);
            self.release(workspace);
            self.trace.empty_cache();
        }
        let bytes = shape.workspace(&sizes, pass, number);
        let workspace = (bytes > 0).then(|| self.alloc(bytes, Category::Workspace));
        self.work(work, operands);
        if let Some(workspace) = workspace {
            self.release(workspace);
        }
    }

    /// The largest of every three by three pixels, at every second pixel. Keeps the places of the maxima.
    pub(crate) fn max_pool(&mut self, images: Variable, numbers: u64) -> Variable {
        let number = images.number;
        self.save_for(&[images], [images.tensor]);
        let output = self.alloc(numbers * number.bytes(), Category::Activation);
        let places = self.alloc(numbers * INDEX, Category::Activation);
        let traffic = self.bytes(images.tensor) + self.bytes(output) + self.bytes(places);
        self.elementwise(traffic, [images.tensor, places, output]);
        self.save_for(&[images], [places]);
        let output = self.output_of(output, number, GraphOperation::MaxPool, &[images]);
        self.release(places);
        output
    }

    /// Zeros, and each gradient at the place of its maximum.
    pub(crate) fn max_pool_backward(&mut self, saved: &UnpackedTensors, incoming: Tensor) -> Tensor {
        let (images, places) = (saved.operand(0, incoming), saved.operand(1, incoming));
        let gradient = self.temporary(self.bytes(images));
        let traffic = self.bytes(gradient) + self.bytes(incoming) + self.bytes(places);
        self.elementwise(traffic, [incoming, places, gradient]);
        gradient
    }

    /// The mean of each channel of an image, over `pixels` pixels.
    pub(crate) fn mean_pool(&mut self, images: Variable, pixels: u64) -> Variable {
        let bytes = self.bytes(images.tensor);
        let output = self.alloc(bytes / pixels, Category::Activation);
        self.work(Work::Reduction { bytes }, [images.tensor, output]);
        self.output_of(output, images.number, GraphOperation::MeanPool { pixels }, &[images])
    }

    /// The gradient of a mean, for every pixel.
    pub(crate) fn mean_pool_backward(&mut self, pixels: u64, incoming: Tensor) -> Tensor {
        let bytes = self.bytes(incoming) * pixels;
        let gradient = self.temporary(bytes);
        self.elementwise(bytes, [incoming, gradient]);
        gradient
    }
}
