//! A minimal WebDriver client, over plain HTTP to a `chromedriver` that it starts.

use std::{
    io::{BufRead, BufReader, ErrorKind, Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, ChildStdout, Command, Stdio},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use serde_json::{Value, json};

static TURN: Mutex<()> = Mutex::new(());

/// A browser window, closed when it is dropped.
pub struct Browser {
    /// One window at a time: several on a busy machine draw so slowly that tests time out.
    _turn: MutexGuard<'static, ()>,
    driver: Child,
    /// The driver's output; kept open so that the driver can keep writing.
    _words: BufReader<ChildStdout>,
    port: u16,
    session: String,
}

impl Browser {
    /// Opens a window, or returns why there is no browser. A browser that exists but does not work
    /// fails the test.
    pub fn open(width: u32, height: u32) -> Result<Browser, String> {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let started = Command::new("chromedriver").arg("--port=0").stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
        let mut driver = match started {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err("chromedriver is not installed".to_owned()),
            started => started.unwrap(),
        };
        let mut words = BufReader::new(driver.stdout.take().unwrap());
        let port = announced_port(&mut words).unwrap();
        let mut browser = Browser { _turn: turn, driver, _words: words, port, session: String::new() };
        let mut arguments: Vec<String> =
            ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"].map(str::to_owned).to_vec();
        arguments.push(format!("--window-size={width},{height}"));
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome",
            "goog:loggingPrefs": { "browser": "ALL", "performance": "ALL" },
            "goog:chromeOptions": { "args": arguments },
        }}});
        let session = match browser.call("POST", "/session", &wanted) {
            Err(error) if error.contains("cannot find Chrome binary") => return Err(error),
            session => session.unwrap(),
        };
        browser.session = session["sessionId"].as_str().unwrap_or_default().to_owned();
        Ok(browser)
    }

    pub fn visit(&self, page: &Path) {
        self.command("url", &json!({ "url": format!("file://{}", page.display()) }));
    }

    /// Runs JavaScript in the page and returns its result.
    pub fn run(&self, script: &str) -> Value {
        self.command("execute/sync", &json!({ "script": script, "args": [] }))
    }

    /// Polls a JavaScript condition until it is `true`.
    pub fn wait_for(&self, condition: &str) {
        for _ in 0..1200 {
            if self.run(&format!("return {condition}")) == json!(true) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("timed out waiting for: {condition}");
    }

    /// Changes the colours of the page, and waits until it is drawn again: pictures follow in the next frame.
    pub fn set_theme(&self, theme: &str) {
        self.run(&format!(
            "document.documentElement.dataset.theme = '{theme}';
             window.frames_drawn = false;
             requestAnimationFrame(() => requestAnimationFrame(() => {{ window.frames_drawn = true; }}));"
        ));
        self.wait_for("window.frames_drawn");
    }

    /// The page's console messages.
    pub fn console(&self) -> Vec<String> {
        self.log("browser").iter().map(|entry| entry["message"].to_string()).collect()
    }

    /// All network requests of the page except for its own file.
    pub fn requests(&self) -> Vec<String> {
        let messages = self.log("performance");
        let events = messages.iter().filter_map(|entry| serde_json::from_str::<Value>(entry["message"].as_str()?).ok());
        events
            .filter(|event| event["message"]["method"] == "Network.requestWillBeSent")
            .filter_map(|event| Some(event["message"]["params"]["request"]["url"].as_str()?.to_owned()))
            .filter(|address| !address.starts_with("file:") && !address.starts_with("data:"))
            .collect()
    }

    /// Moves the mouse along these window coordinates, with the button down from the second point
    /// on, and releases it.
    pub fn drag(&self, from: (i64, i64), to: (i64, i64)) {
        let at = |(x, y): (i64, i64)| json!({ "type": "pointerMove", "duration": 50, "x": x, "y": y });
        self.command(
            "actions",
            &json!({ "actions": [{ "type": "pointer", "id": "mouse", "actions": [
                at(from), { "type": "pointerDown", "button": 0 }, at(to), { "type": "pointerUp", "button": 0 },
            ]}]}),
        );
    }

    pub fn hover(&self, place: (i64, i64)) {
        self.command(
            "actions",
            &json!({ "actions": [{ "type": "pointer", "id": "mouse", "actions": [
                { "type": "pointerMove", "duration": 10, "x": place.0, "y": place.1 },
            ]}]}),
        );
    }

    /// Sends keys to the focused element.
    pub fn press(&self, key: &str) {
        self.command(
            "actions",
            &json!({ "actions": [{ "type": "key", "id": "keys", "actions": [
                { "type": "keyDown", "value": key }, { "type": "keyUp", "value": key },
            ]}]}),
        );
    }

    /// Saves a screenshot of the first `height` pixels of the page at this width.
    pub fn picture(&self, width: u32, height: u32, file: &Path) {
        let screen = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.devtools("Emulation.setDeviceMetricsOverride", &screen);
        std::thread::sleep(Duration::from_millis(400));
        let shot = self.devtools("Page.captureScreenshot", &json!({ "format": "png" }));
        std::fs::write(file, from_base64(shot["data"].as_str().unwrap())).unwrap();
    }

    pub fn devtools(&self, command: &str, parameters: &Value) -> Value {
        self.command("goog/cdp/execute", &json!({ "cmd": command, "params": parameters }))
    }

    fn log(&self, kind: &str) -> Vec<Value> {
        self.command("se/log", &json!({ "type": kind })).as_array().cloned().unwrap_or_default()
    }

    fn command(&self, name: &str, body: &Value) -> Value {
        self.call("POST", &format!("/session/{}/{name}", self.session), body).unwrap()
    }

    fn call(&self, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        let text = body.to_string();
        let port = self.port;
        let exchange = || -> std::io::Result<Vec<u8>> {
            let mut stream = TcpStream::connect(("127.0.0.1", port))?;
            stream.set_read_timeout(Some(Duration::from_secs(60)))?;
            write!(
                stream,
                "{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: \
                 {}\r\nConnection: close\r\n\r\n{text}",
                text.len()
            )?;
            // The driver keeps connections open even if asked to close them: the length marks the
            // end of the answer.
            let mut reader = BufReader::new(stream);
            let mut length = 0;
            loop {
                let mut line = String::new();
                reader.read_line(&mut line)?;
                if line.trim().is_empty() {
                    break;
                }
                if let Some((name, value)) = line.split_once(':')
                    && name.eq_ignore_ascii_case("content-length")
                {
                    length = value.trim().parse().unwrap_or(0);
                }
            }
            let mut answer = vec![0; length];
            reader.read_exact(&mut answer)?;
            Ok(answer)
        };
        let answer = exchange().map_err(|error| format!("{method} {path}: {error}"))?;
        let mut answer: Value = serde_json::from_slice(&answer).map_err(|error| error.to_string())?;
        let value = answer["value"].take();
        match value.get("error") {
            Some(error) => Err(format!("{path}: {error}: {}", value["message"])),
            None => Ok(value),
        }
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        if !self.session.is_empty() {
            let _ = self.call("DELETE", &format!("/session/{}", self.session), &json!({}));
        }
        let _ = self.driver.kill();
        let _ = self.driver.wait();
    }
}

/// `ChromeDriver was started successfully on port 12345.`
fn announced_port(words: &mut BufReader<ChildStdout>) -> Option<u16> {
    for line in words.lines().map_while(Result::ok) {
        if let Some((_, rest)) = line.split_once("successfully on port ") {
            return rest.trim_end_matches('.').parse().ok();
        }
    }
    None
}

pub fn from_base64(text: &str) -> Vec<u8> {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits: Vec<u32> =
        text.bytes().filter_map(|letter| LETTERS.iter().position(|&known| known == letter)).map(|d| d as u32).collect();
    let mut bytes = Vec::new();
    for group in digits.chunks(4) {
        let number = group.iter().fold(0, |sum, digit| sum << 6 | digit) << (6 * (4 - group.len()));
        bytes.extend(&number.to_be_bytes()[1..group.len()]);
    }
    bytes
}
