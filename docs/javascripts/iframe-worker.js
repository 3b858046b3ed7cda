// Browsers start no Worker for a page that is opened from disk (file://), and the theme's search runs in one.
// There, and only there, a hidden frame takes its place: it loads the same script, and messages are passed as events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.onerror = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const address = new URL(url, location.href);
      const inside = (this.inside = frame.contentWindow);
      const load = (source) =>
        new Promise((resolve, reject) => {
          const script = frame.contentDocument.createElement("script");
          script.src = new URL(source, address); // as in a Worker: relative to its own script
          script.onload = resolve;
          script.onerror = reject;
          frame.contentDocument.body.append(script);
        });
      inside.importScripts = (...sources) => sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      inside.postMessage = (data) => this.deliver(data);
      this.loaded = load(address);
    }

    deliver(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      this.onmessage?.(event);
    }

    postMessage(data) {
      this.loaded.then(() => {
        const event = new this.inside.MessageEvent("message", { data });
        this.inside.dispatchEvent(event);
      });
    }

    terminate() {
      this.inside.frameElement.remove();
    }
  };
}
