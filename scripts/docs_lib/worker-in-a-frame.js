// A browser refuses workers of pages that are opened as files. Search is a worker: there it runs in a hidden frame.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.frame = frame.contentWindow
      window.addEventListener("message", event => {
        if (event.source === this.frame) this.dispatchEvent(new MessageEvent("message", { data: event.data }))
      })
      const prepare = "postMessage = data => parent.dispatchEvent(new MessageEvent('message', { data, source: window }));"
        + "importScripts = (...urls) => Promise.all(urls.map(url => new Promise(done => {"
        + "const script = document.createElement('script'); script.src = url; script.onload = done;"
        + "document.body.appendChild(script) })))"
      this.loaded = new Promise(done => { this.done = done })
      this.frame.document.open()
      this.frame.document.write("<html><body><script>" + prepare + "<\/script></body></html>")
      this.frame.document.close()
      const script = this.frame.document.createElement("script")
      script.src = url
      script.onload = () => this.done()
      this.frame.document.body.appendChild(script)
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.dispatchEvent(new MessageEvent("message", { data, source: window })))
    }
    terminate() {}
  }
// Search looks for all words that begin as those of the question: "a" would find every title with such a word. And it leaves
// out pages with a word behind a dash, such as an option's name.
const post = Worker.prototype.postMessage
const small = /(^|\s)(an?|and|are|as|at|by|can|does|do|for|from|how|if|in|is|it|its|i|my|of|on|or|that|the|to|was|what|when|where|which|who|why|with)(?=\s|$)/gi
Worker.prototype.postMessage = function (message, ...more) {
  const words = typeof message.data === "string" && message.data.replace(/(^|\s)-+/g, "$1").replace(small, "").trim()
  return post.call(this, words ? { ...message, data: words } : message, ...more)
}
