// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// sluice-cni is the CNI plugin: a container runtime executes it for each verb. It leases addresses from sluice-ipam,
// calls sluice-datapath to connect the container, and returns a CNI result. Standard output contains only the result or
// an error, in the format of CNI.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/sluice-net/sluice/kit/fault"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/requestid"
	built "github.com/sluice-net/sluice/kit/version"
	"github.com/sluice-net/sluice/services/cni-shim/internal/attachment"
	"github.com/sluice-net/sluice/services/cni-shim/internal/cni"
	"github.com/sluice-net/sluice/services/cni-shim/internal/invocation"
	"github.com/sluice-net/sluice/services/cni-shim/internal/logfile"
)

func main() {
	// If the runtime has exited, SIGPIPE must not kill an ADD that has to be undone. The write of the result fails
	// instead.
	signal.Ignore(syscall.SIGPIPE)
	if text, ok := about(os.Args[1:]); ok {
		fmt.Println(text)
		return
	}
	os.Exit(run(os.Getenv, os.Stdin, os.Stdout, os.Stderr))
}

// about answers a user who executes the plugin with arguments; a runtime passes none.
func about(args []string) (text string, ok bool) {
	if len(args) != 1 {
		return "", false
	}
	switch args[0] {
	case "--version":
		return "sluice-cni " + built.Get().String(), true
	case "--help", "-h":
		return "sluice-cni " + built.Get().String() + `

The CNI plugin of Sluice. A container runtime executes it with the variables CNI_COMMAND,
CNI_CONTAINERID, CNI_IFNAME, CNI_NETNS and CNI_PATH, and the configuration on standard input.

  sluice-cni --version   print the version
  sluice-cni --help      print this`, true
	}
	return "", false
}

// run executes the plugin without access to process-wide state. It returns the exit code.
func run(getenv func(string) string, stdin io.Reader, stdout, stderr io.Writer) int {
	version, err := execute(getenv, stdin, stdout, stderr)
	if err == nil {
		return 0
	}
	var cniErr *cni.Error
	if !errors.As(err, &cniErr) {
		cniErr = cni.NewError(attachment.CodeInternal, err.Error(), "")
	}
	// CNI requires errors on standard output.
	answer := struct {
		CNIVersion string `json:"cniVersion"`
		*cni.Error
	}{version, cniErr}
	b, err := json.MarshalIndent(answer, "", "    ")
	if err == nil {
		_, err = stdout.Write(append(b, '\n'))
	}
	if err != nil {
		fmt.Fprintln(stderr, "sluice-cni:", cniErr, "(and standard output:", err, ")")
	}
	return 1
}

// execute executes the verb. It returns the CNI version in which to report an error, and the error.
func execute(getenv func(string) string, stdin io.Reader, stdout, stderr io.Writer) (version string, err error) {
	start := time.Now()
	version = invocation.Current
	if err := fault.Arm(); err != nil {
		return version, err
	}
	command, err := invocation.ParseCommand(getenv)
	if err != nil {
		return version, err
	}
	if command == invocation.Version {
		return version, printVersions(stdout)
	}
	// Read one byte beyond the limit, to detect an input that is too large.
	input, err := io.ReadAll(io.LimitReader(stdin, invocation.MaxStdin+1))
	if err != nil {
		return version, cni.NewError(cni.ErrIOFailure, "read standard input: "+err.Error(), "")
	}
	in, err := invocation.Parse(command, getenv, input)
	if err != nil {
		return invocation.AnswerVersion(input), err
	}
	version = in.Config.CNIVersion
	for _, what := range in.Config.Ignored {
		fmt.Fprintln(stderr, "sluice-cni: ignored:", what)
	}

	logger, closeLog := openLog(in.Config.LogFile, stderr)
	defer closeLog()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	ctx = requestid.Into(ctx, requestid.New())
	logger = logger.With("command", string(in.Command), "network", in.Config.Name)
	if in.Owner.ContainerID != "" {
		logger = logger.With("container_id", in.Owner.ContainerID, "interface", in.Owner.Interface)
	}
	if in.Pod.Name != "" {
		logger = logger.With("pod", in.Pod.Namespace+"/"+in.Pod.Name)
	}

	plugin, err := attachment.New(in, logger, start)
	if err != nil {
		return version, err
	}
	err = plugin.Run(ctx, stdout)
	plugin.Report(ctx, err)
	return version, err
}

// printVersions answers VERSION.
func printVersions(w io.Writer) error {
	b, err := json.Marshal(struct {
		CNIVersion string   `json:"cniVersion"`
		Supported  []string `json:"supportedVersions"`
	}{invocation.Current, invocation.Versions})
	if err == nil {
		_, err = w.Write(append(b, '\n'))
	}
	if err != nil {
		return cni.NewError(cni.ErrIOFailure, "write the versions: "+err.Error(), "")
	}
	return nil
}

// openLog opens the log. A failure must not prevent the connection of a container: openLog then writes the reason to
// standard error, which the runtime logs.
func openLog(path string, stderr io.Writer) (*slog.Logger, func()) {
	if path == "" {
		return log.Discard(), func() {}
	}
	f, err := logfile.Open(path)
	if err != nil {
		fmt.Fprintln(stderr, "sluice-cni: no log:", err)
		return log.Discard(), func() {}
	}
	return log.New(f, slog.LevelInfo), func() { f.Close() }
}
