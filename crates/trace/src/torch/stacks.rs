//! Call stacks, each kept once however many entries and blocks share it.

use std::{collections::HashMap, fmt, sync::Arc};

/// A number of a stack in [`Stacks`]; 0 is "not recorded".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackId(pub u32);

impl StackId {
    /// No stack was recorded.
    pub const NONE: StackId = StackId(0);
}

/// How the folder ends that pip and distributions install packages in.
const PACKAGES: &str = "-packages/";

/// One line of a stack.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Frame {
    /// The source file; `??` where the C++ unwinder did not know.
    pub filename: Arc<str>,
    /// The line in it.
    pub line: u32,
    /// The function.
    pub name: Arc<str>,
}

impl Frame {
    fn is_python(&self) -> bool {
        self.filename.ends_with(".py") || self.filename.starts_with('<')
    }

    /// Whether it belongs to a package that pip or the distribution installed, or to Python itself.
    fn is_installed(&self) -> bool {
        self.filename.contains(PACKAGES) || self.filename.contains("/lib/python") || self.filename.starts_with('<')
    }
}

impl fmt::Display for Frame {
    /// `file:line function`, without the folder that packages are installed in.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let filename = self.filename.rsplit_once(PACKAGES).map_or(&*self.filename, |(_, within)| within);
        write!(f, "{filename}:{} {}", self.line, self.name)
    }
}

/// Every distinct stack of a snapshot.
#[derive(Clone, Debug)]
pub struct Stacks {
    frames: Vec<Frame>,
    frame_numbers: HashMap<Frame, u32>,
    /// Innermost frame first.
    stacks: Vec<Arc<[u32]>>,
    stack_numbers: HashMap<Arc<[u32]>, StackId>,
}

impl Default for Stacks {
    fn default() -> Self {
        let nothing: Arc<[u32]> = Arc::new([]);
        Stacks {
            frames: Vec::new(),
            frame_numbers: HashMap::new(),
            stacks: vec![Arc::clone(&nothing)],
            stack_numbers: HashMap::from([(nothing, StackId::NONE)]),
        }
    }
}

impl Stacks {
    /// The number of a frame.
    pub fn intern_frame(&mut self, frame: Frame) -> u32 {
        if let Some(&number) = self.frame_numbers.get(&frame) {
            return number;
        }
        let number = self.frames.len() as u32;
        self.frames.push(frame.clone());
        self.frame_numbers.insert(frame, number);
        number
    }

    /// The number of a stack, given by the numbers of its frames, innermost first.
    pub fn intern(&mut self, frames: &[u32]) -> StackId {
        if let Some(&number) = self.stack_numbers.get(frames) {
            return number;
        }
        let number = StackId(self.stacks.len() as u32);
        let frames: Arc<[u32]> = frames.into();
        self.stacks.push(Arc::clone(&frames));
        self.stack_numbers.insert(frames, number);
        number
    }

    /// How many there are, "not recorded" included.
    #[must_use]
    pub fn count(&self) -> usize {
        self.stacks.len()
    }

    /// The numbers of the frames of a stack, innermost first.
    #[must_use]
    pub fn members(&self, stack: StackId) -> &[u32] {
        self.stacks.get(stack.0 as usize).map_or(&[], |frames| frames)
    }

    /// Every distinct frame, by number.
    #[must_use]
    pub fn all_frames(&self) -> &[Frame] {
        &self.frames
    }

    /// The frames of a stack, innermost first.
    pub fn frames(&self, stack: StackId) -> impl Iterator<Item = &Frame> {
        self.members(stack).iter().map(|&frame| &self.frames[frame as usize])
    }

    /// The call site in a few words, as `file:line function`: the innermost Python frame, or the innermost of all. Of an
    /// installed package also the program's own line that led there, which is the one that its author can change.
    #[must_use]
    pub fn site(&self, stack: StackId) -> Option<String> {
        let frame = self.frames(stack).find(|frame| frame.is_python()).or_else(|| self.frames(stack).next())?;
        let own = self.frames(stack).find(|frame| frame.is_python() && !frame.is_installed());
        Some(match own.filter(|_| frame.is_installed()) {
            Some(own) => format!("{frame} from {own}"),
            None => frame.to_string(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_site_is_the_innermost_python_frame() {
        let mut stacks = Stacks::default();
        let frame = |filename: &str, name: &str| Frame { filename: filename.into(), line: 7, name: name.into() };
        let unwound = stacks.intern_frame(frame("??", "c10::malloc"));
        let forward = stacks.intern_frame(frame("model.py", "forward"));
        let main = stacks.intern_frame(frame("train.py", "main"));
        let stack = stacks.intern(&[unwound, forward, main]);
        assert_eq!(stacks.site(stack).as_deref(), Some("model.py:7 forward"));
        let native_only = stacks.intern(&[unwound]);
        assert_eq!(stacks.site(native_only).as_deref(), Some("??:7 c10::malloc"));
        assert_eq!(stacks.intern(&[unwound, forward, main]), stack);
        assert_eq!(stacks.site(StackId::NONE), None);
    }

    #[test]
    fn inside_a_package_the_line_of_the_program_that_led_there_is_named_too() {
        let mut stacks = Stacks::default();
        let mut frame =
            |filename: &str| stacks.intern_frame(Frame { filename: filename.into(), line: 7, name: "f".into() });
        let linear = frame("/opt/venv/lib/python3.12/site-packages/torch/nn/linear.py");
        let (runpy, compiled) = (frame("/usr/lib/python3.12/runpy.py"), frame("<string>"));
        let (model, main) = (frame("/home/me/model.py"), frame("/home/me/train.py"));
        let mut site = |frames: &[u32]| {
            let stack = stacks.intern(frames);
            stacks.site(stack).unwrap()
        };
        assert_eq!(site(&[linear, model, main, runpy]), "torch/nn/linear.py:7 f from /home/me/model.py:7 f");
        assert_eq!(site(&[compiled, main]), "<string>:7 f from /home/me/train.py:7 f");
        assert_eq!(site(&[model, linear, main]), "/home/me/model.py:7 f");
        assert_eq!(site(&[linear, runpy]), "torch/nn/linear.py:7 f");
    }
}
