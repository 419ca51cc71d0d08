// A plain server that runs commands, as one writes it in Go with nothing but the standard library: net/http and os/exec.
// No authentication, no limits, no other user for commands. It is a yardstick and must never be reachable by others.
//
//	POST /v1/exec {"command": ["true"]}    -> {"exit_code":0,"stdout":"","stderr":""}
//	same, Accept: application/octet-stream -> the output's bytes as they come
//	PUT, GET /v1/files?path=NAME           -> a file of the directory given by -files, written and read
//	GET /healthz                           -> {"status":"ok"}
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
)

type request struct {
	Command []string `json:"command"`
}

type answer struct {
	ExitCode int    `json:"exit_code"`
	Stdout   string `json:"stdout"`
	Stderr   string `json:"stderr"`
}

func runCommand(w http.ResponseWriter, r *http.Request) {
	var asked request
	if err := json.NewDecoder(r.Body).Decode(&asked); err != nil || len(asked.Command) == 0 {
		http.Error(w, "a command is a list of strings", http.StatusBadRequest)
		return
	}
	command := exec.CommandContext(r.Context(), asked.Command[0], asked.Command[1:]...)
	if r.Header.Get("Accept") == "application/octet-stream" {
		stream(w, command)
		return
	}
	var stdout, stderr bytes.Buffer
	command.Stdout, command.Stderr = &stdout, &stderr
	var exit *exec.ExitError
	if err := command.Run(); err != nil && !errors.As(err, &exit) {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(answer{command.ProcessState.ExitCode(), stdout.String(), stderr.String()})
}

// The output as it comes: flushed after each piece, or its first byte would wait for a buffer to fill.
func stream(w http.ResponseWriter, command *exec.Cmd) {
	output, err := command.StdoutPipe()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	piece, flusher := make([]byte, 256<<10), w.(http.Flusher)
	for {
		n, err := output.Read(piece)
		if n > 0 {
			if _, failed := w.Write(piece[:n]); failed != nil {
				break
			}
			flusher.Flush()
		}
		if err != nil {
			break
		}
	}
	command.Wait()
}

func takeFile(directory string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		path := filepath.Join(directory, filepath.Base(r.URL.Query().Get("path")))
		if r.Method == http.MethodGet {
			http.ServeFile(w, r, path)
			return
		}
		file, err := os.Create(path)
		if err == nil {
			_, err = io.Copy(file, r.Body)
			err = errors.Join(err, file.Close())
		}
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Write([]byte("{}"))
	}
}

func main() {
	tcp := flag.String("tcp", "", "a port of the loopback")
	unix := flag.String("unix", "", "or the path of a Unix socket")
	files := flag.String("files", "", "the directory of the files")
	flag.Parse()
	network, address := "tcp", "127.0.0.1:"+*tcp
	if *unix != "" {
		network, address = "unix", *unix
	}
	listener, err := net.Listen(network, address)
	if err != nil {
		log.Fatal(err)
	}
	http.HandleFunc("/v1/exec", runCommand)
	http.HandleFunc("/v1/files", takeFile(*files))
	http.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Write([]byte(`{"status":"ok"}`))
	})
	log.Fatal(http.Serve(listener, nil))
}
