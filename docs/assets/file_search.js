// The theme's search runs in a worker, which browsers refuse to pages opened from disk (file://).
// There, a hidden frame runs the same script: what the script posts comes back as messages.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.body.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise((resolve) => {
        const script = this.scope.document.createElement("script");
        script.src = url;
        script.onload = resolve;
        this.scope.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => {
        this.scope.dispatchEvent(new this.scope.MessageEvent("message", { data }));
      });
    }

    terminate() {
      this.scope.frameElement.remove();
    }
  };
}
