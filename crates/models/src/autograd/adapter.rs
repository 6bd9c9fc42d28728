//! Low-rank adaptation: thin trainable products beside a frozen one.

use super::{
    graph::Value,
    machine::Machine,
    weights::{Adapter, Linear, Split},
};
use oomph_trace::Category;

impl Machine {
    /// `input` through the adapter's narrow waist, scaled and added to what the frozen weight made of it.
    pub(super) fn add_adapter(&mut self, input: Value, linear: &Linear, adapter: Adapter, output: Value) -> Value {
        let thin =
            |weight, inputs, outputs, split| Linear { weight, bias: None, inputs, outputs, split, adapter: None };
        let (into_waist, out_of_waist) = match linear.split {
            Split::Inputs => (Split::Inputs, Split::Whole),
            Split::Outputs | Split::Whole => (Split::Whole, linear.split),
        };
        let down = thin(adapter.down, linear.inputs, adapter.rank, into_waist);
        let up = thin(adapter.up, adapter.rank, linear.outputs, out_of_waist);
        let waist = self.linear(input, down, Category::Activation);
        let raised = self.linear(waist, up, Category::Temporary);
        self.release(waist.tensor);
        let scaled = self.scale(raised);
        self.release(raised.tensor);
        let sum = self.add(output, scaled, Category::Activation);
        self.release_all([output.tensor, scaled.tensor]);
        sum
    }
}
