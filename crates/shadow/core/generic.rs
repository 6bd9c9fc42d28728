//! Functions without behaviour of their own: every out-parameter is written, success (0) is returned.

use std::{
    arch::naked_asm,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use crate::{
    arguments::{Out, new_handle},
    functions::{FunctionArgument, FunctionLine},
    state,
};

/// What a function must write.
pub struct Record {
    name: String,
    arguments: Vec<FunctionArgument>,
    /// Whether the table has the function.
    known: bool,
    called: AtomicBool,
}

impl Record {
    /// What a line of the table says.
    pub fn of_line(line: &FunctionLine) -> Record {
        Record {
            name: line.name.to_owned(),
            arguments: line.arguments().collect(),
            known: true,
            called: AtomicBool::new(false),
        }
    }

    /// A function that no table has: nothing is known about its arguments.
    pub fn of_unknown(name: &str) -> Record {
        Record { name: name.to_owned(), arguments: Vec::new(), known: false, called: AtomicBool::new(false) }
    }
}

/// The entry of all functions without behaviour. The forwarder's slot is in r11: code pointer, then record pointer.
#[unsafe(naked)]
pub extern "C" fn entry() {
    naked_asm!(
        "mov r10, [r11 + 8]",
        "jmp {with_record}",
        with_record = sym entry_with_record,
    )
}

/// The same with the record in r10. Puts the six integer argument registers on the stack and passes them, and the
/// address of the arguments on the stack, to [`serve`].
#[unsafe(naked)]
extern "C" fn entry_with_record() {
    naked_asm!(
        "push r9",
        "push r8",
        "push rcx",
        "push rdx",
        "push rsi",
        "push rdi",
        "mov rdi, r10",
        "mov rsi, rsp",
        "lea rdx, [rsp + 56]",
        "sub rsp, 8",
        "call {serve}",
        "add rsp, 56",
        "ret",
        serve = sym serve,
    )
}

static SMALL_HANDLES: AtomicU64 = AtomicU64::new(1);
static EMPTY_TEXT: [u8; 8] = [0; 8];

/// Serves a call: `registers` are six words, `stack` the arguments behind them.
pub extern "C" fn serve(record: *const Record, registers: *const u64, stack: *const u64) -> u64 {
    // SAFETY: records are made by `binding` and never freed.
    let record = unsafe { &*record };
    if !record.called.swap(true, Ordering::Relaxed) && !record.known {
        state::note_unserved(&record.name);
    }
    let word = |position: u8| {
        let position = usize::from(position);
        // SAFETY: the entry saved six registers; positions from 6 on are arguments that the function's declaration has,
        // so the caller put them on its stack.
        unsafe { if position < 6 { registers.add(position).read() } else { stack.add(position - 6).read() } }
    };
    let mut answer = 0;
    for argument in &record.arguments {
        match *argument {
            FunctionArgument::Handle(at) => Out(word(at) as *mut u64).set(new_handle(0)),
            FunctionArgument::SmallHandle(at) => {
                Out(word(at) as *mut u32).set(SMALL_HANDLES.fetch_add(1, Ordering::Relaxed) as u32);
            }
            FunctionArgument::Text(at) => Out(word(at) as *mut u64).set(EMPTY_TEXT.as_ptr() as u64),
            FunctionArgument::Zeros(bytes, at) => Out(word(at) as *mut u8).zero(usize::from(bytes)),
            FunctionArgument::TextBuffer(at, length) if word(length) as u32 > 0 => Out(word(at) as *mut u8).set(0),
            FunctionArgument::Buffer(at, length) => Out(word(at) as *mut u8).zero(word(length) as u32 as usize),
            FunctionArgument::ReturnsText => answer = EMPTY_TEXT.as_ptr() as u64,
            FunctionArgument::TextBuffer(..) | FunctionArgument::Pointer(_) => {}
        }
    }
    answer
}

/// How many functions can be asked for by name; the table of the driver has fewer that are not behaviour.
const STUBS: usize = 1024;

// Pieces of code that differ only in their own address: the n-th leads to the n-th slot. They exist from the start, so
// nothing is made executable while a program runs.
std::arch::global_asm!(
    ".p2align 4",
    ".hidden oomph_shadow_stubs",
    "oomph_shadow_stubs:",
    ".rept 1024",
    "lea r11, [rip - 7]",
    "jmp oomph_shadow_stub_end",
    ".p2align 4",
    ".endr",
    "oomph_shadow_stub_end:",
    "lea r10, [rip + oomph_shadow_stubs]",
    "sub r11, r10",
    "lea r10, [rip + {slots}]",
    "mov r10, [r10]",
    "shr r11, 1",
    "mov r10, [r10 + r11]",
    "jmp {entry}",
    slots = sym STUB_RECORDS,
    entry = sym entry_with_record,
);

unsafe extern "C" {
    #[link_name = "oomph_shadow_stubs"]
    static FIRST_STUB: u8;
}

/// The address of an array of records, one for each stub.
static STUB_RECORDS: AtomicUsize = AtomicUsize::new(0);
static STUB_NAMES: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The code of a function that is asked for by name, without a forwarder.
pub fn stub_for(name: &str, record: *const Record) -> *const () {
    let mut names = state::locked(&STUB_NAMES);
    if STUB_RECORDS.load(Ordering::Acquire) == 0 {
        STUB_RECORDS.store(Box::leak(Box::new([0u64; STUBS])).as_ptr() as usize, Ordering::Release);
    }
    let index = names.iter().position(|known| known == name).unwrap_or_else(|| {
        names.push(name.to_owned());
        names.len() - 1
    });
    if index >= STUBS {
        return std::ptr::null();
    }
    // SAFETY: the array has `STUBS` elements and is never freed; stubs read an element only after its address was given
    // out, which happens after this write. The stub's address stays within the block of `STUBS` times 16 bytes.
    unsafe {
        (STUB_RECORDS.load(Ordering::Acquire) as *mut u64).add(index).write(record as u64);
        (&raw const FIRST_STUB).add(index * 16).cast()
    }
}
