// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package invocation

import (
	"context"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"
)

// ExitOnStdinEOF is the flag that makes a command exit with its caller. A command that kubectl executes in a pod
// receives no signal when kubectl exits: only its standard input is closed.
const ExitOnStdinEOF = "exit-on-stdin-eof"

// UntilInputEnds is the former name of ExitOnStdinEOF. The kubectl plugin passes it until 0.2.0, because the program
// in the pod may be older than the plugin.
const UntilInputEnds = "until-input-ends"

// ExitOnStdinEOFFlag adds the flag to a command, which calls EndWith if it is set.
func ExitOnStdinEOFFlag(cmd *cobra.Command, to *bool) {
	cmd.Flags().BoolVar(to, ExitOnStdinEOF, false, "exit when standard input ends, for a caller on another machine")
	formerFlag(cmd, UntilInputEnds, ExitOnStdinEOF)
}

// abandoned is how long a command may continue to write after its input has ended.
const abandoned = 2 * time.Second

// EndWith returns a context that ends when the input ends. The process exits 2 s later unless stop was called: if
// kubectl is killed, the output pipe of the command in the pod stays open without a reader, and a write would block
// forever.
func EndWith(ctx context.Context, input io.Reader) (_ context.Context, stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, input)
		cancel()
		select {
		case <-stopped:
		case <-time.After(abandoned):
			os.Exit(ExitFailed)
		}
	}()
	return ctx, func() {
		cancel()
		close(stopped)
	}
}
