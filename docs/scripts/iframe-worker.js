/* Browsers start no workers for pages that were opened from a folder, but the search of the theme is
 * one. For such pages this class runs the script of a worker in a hidden frame instead: messages go
 * either way as events. Pages that come from a server keep their workers. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      const attach = () => {
        document.body.append(this.frame);
        const inner = this.frame.contentWindow;
        const loads = [];
        inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inner.importScripts = (...urls) => {
          for (const each of urls) loads.push(this.load(each));
          return Promise.all(loads);
        };
        this.load(url).then(() => {
          const ready = this.waiting;
          this.waiting = null;
          ready.forEach((data) => this.postMessage(data));
        });
      };
      if (document.body) attach();
      else document.addEventListener("DOMContentLoaded", attach);
    }

    load(url) {
      return new Promise((resolve, reject) => {
        const script = this.frame.contentDocument.createElement("script");
        script.src = String(url);
        script.onload = resolve;
        script.onerror = () => reject(new Error(`could not load ${url}`));
        this.frame.contentDocument.body.append(script);
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
