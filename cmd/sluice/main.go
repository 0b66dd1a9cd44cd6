// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Sluice shows what the services of a node know and do, and runs a whole node
// for development. It owns nothing: every fact comes from a service's socket.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/process"
	"github.com/sluice-net/sluice/kit/rpc/client"
)

// Exit codes.
const (
	exitFailed   = 1
	exitUsage    = 2
	exitNotReady = 3 // `status`: a service does not serve, or ADD is refused; `policy`: the kernel does not enforce it
)

// exitError ends the program with an exit code.
type exitError struct {
	code int
	err  error // nil: the output has said why
}

func (e *exitError) Error() string { return fmt.Sprintf("exit code %d: %v", e.code, e.err) }
func (e *exitError) Unwrap() error { return e.err }

var (
	// errReported is returned by commands whose output says what is wrong.
	errReported error = &exitError{code: exitFailed}
	// errNotReady is returned by commands whose output says why the node is not
	// ready, or why the kernel does not enforce a change.
	errNotReady error = &exitError{code: exitNotReady}
)

// commands are those of the program, in the order in which they were added.
var commands = []func(*command) *cobra.Command{
	(*command).statusCommand, (*command).endpointCommand, (*command).identityCommand, (*command).ipamCommand,
	(*command).policyCommand, (*command).explainCommand, (*command).observeCommand, (*command).mapCommand, (*command).auditCommand,
	(*command).prepareCommand, (*command).devCommand,
}

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr, commands...)) }

// run executes the program with some commands, and returns its exit code.
func run(args []string, stdout, stderr io.Writer, commands ...func(*command) *cobra.Command) int {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	c := &command{out: stdout, errOut: stderr}
	root := c.root(commands...)
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	var exit *exitError
	var usage *usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit):
		if exit.err != nil {
			c.complain(exit.err)
		}
		return exit.code
	case errors.As(err, &usage):
		c.complain(err)
		return exitUsage
	default:
		c.complain(err)
		return exitFailed
	}
}

// complain prints an error to standard error, in the format that was asked for.
func (c *command) complain(err error) {
	var usage *usageError
	text := err.Error()
	if !errors.As(err, &usage) {
		text = c.explain(err)
	}
	if c.format == "json" {
		encoder := json.NewEncoder(c.errOut)
		encoder.SetEscapeHTML(false)
		if encoder.Encode(map[string]string{"error": text}) == nil {
			return
		}
	}
	fmt.Fprintf(c.errOut, "sluice: %s\n", text)
}

// command is what all subcommands share.
type command struct {
	out, errOut io.Writer

	instance string
	runDir   string // overrides the instance's
	format   string // "table" or "json"
	timeout  time.Duration
}

// usageError is a mistake on the command line.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// root is the command that has all others.
func (c *command) root(commands ...func(*command) *cobra.Command) *cobra.Command {
	root := &cobra.Command{
		Use:   "sluice",
		Short: "Show and run a Sluice node",
		Long: `Show what the services of a Sluice node know and do, apply and explain network
policies, and run a whole node for development. Every answer comes from a service's socket, which root and members
of group 65700 may open. The group may read; what changes something, audit and map dump are for root alone.`,
		Args:          cobra.ArbitraryArgs,
		RunE:          onlyGroups,
		SilenceUsage:  true,
		SilenceErrors: true,
		Version:       process.Version().String(),
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			if c.format != "table" && c.format != "json" {
				return usagef("--output: %q is neither table nor json", c.format)
			}
			if c.timeout <= 0 {
				return usagef("--timeout: %s is not positive", c.timeout)
			}
			return nil
		},
	}
	flags := root.PersistentFlags()
	flags.StringVar(&c.instance, "instance", os.Getenv("SLUICE_INSTANCE"), "name of the copy of Sluice to talk to (or SLUICE_INSTANCE); empty for the machine's own")
	flags.StringVar(&c.runDir, "run-dir", "", "directory of the sockets, if it is not the instance's")
	flags.StringVarP(&c.format, "output", "o", "table", "table or json")
	flags.DurationVar(&c.timeout, "timeout", 10*time.Second, "how long one answer may take")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	for _, command := range commands {
		root.AddCommand(command(c))
	}
	return root
}

// group is a command that only has subcommands.
func group(use, short string, subcommands ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.ArbitraryArgs, RunE: onlyGroups}
	cmd.AddCommand(subcommands...)
	return cmd
}

// onlyGroups runs when none of a command's subcommands was named.
func onlyGroups(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return usagef("%s has no command %q; see `%s --help`", cmd.CommandPath(), args[0], cmd.CommandPath())
	}
	return cmd.Help()
}

// args checks the number of arguments.
func args(n int, what string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == n {
			return nil
		}
		if n == 0 {
			return usagef("%s takes no argument, got %q", cmd.CommandPath(), args)
		}
		return usagef("%s wants %s", cmd.CommandPath(), what)
	}
}

// socket is the path of a service's socket.
func (c *command) socket(service string) (string, error) {
	paths, err := instance.New(c.instance)
	if err != nil {
		return "", usagef("--instance: %w", err)
	}
	if c.runDir != "" {
		if paths.RunDir, err = filepath.Abs(c.runDir); err != nil {
			return "", usagef("--run-dir: %w", err)
		}
	}
	return paths.Socket(service), nil
}

// dial connects to a service. A call fails at once if nobody answers: a person
// waits for it.
func (c *command) dial(service string) (*grpc.ClientConn, error) {
	path, err := c.socket(service)
	if err != nil {
		return nil, err
	}
	return client.Dial(path, client.Options{Timeout: c.timeout})
}

// explain puts an error into words, and says what to look at where that is
// known.
func (c *command) explain(err error) string {
	st, ok := status.FromError(err)
	if !ok {
		return err.Error()
	}
	text := reason(st)
	switch st.Code() {
	case codes.Unavailable:
		if strings.HasSuffix(text, syscall.EACCES.Error()) {
			return text + "\n" + whoMay
		}
		if dir, err := c.socket("ipam"); err == nil {
			return fmt.Sprintf("%s\n%sDoes it run? Its sockets are expected under %s; `sluice status` shows which services answer.", text, c.otherNodes(), filepath.Dir(filepath.Dir(dir)))
		}
	case codes.PermissionDenied: // the socket let the caller in, the method did not
		return text + "\n" + rootOnly
	case codes.NotFound, codes.InvalidArgument, codes.AlreadyExists, codes.FailedPrecondition, codes.ResourceExhausted, codes.OutOfRange, codes.Aborted:
		return text
	case codes.Unimplemented:
		return text + "\nIs the service of an older version than this program?"
	}
	return fmt.Sprintf("%s: %s", st.Code(), text)
}

// otherNodes names the development nodes of this machine, of which one was
// probably meant if no instance was named.
func (c *command) otherNodes() string {
	if c.instance != "" || c.runDir != "" {
		return ""
	}
	found, err := filepath.Glob("/run/sluice-*/dev.json")
	if err != nil || len(found) == 0 || len(found) > 8 {
		return ""
	}
	for i, path := range found {
		found[i] = "--instance " + strings.TrimPrefix(filepath.Base(filepath.Dir(path)), "sluice-")
	}
	return fmt.Sprintf("There are development nodes: %s.\n", strings.Join(found, ", "))
}

// Who may open a socket, and what that is not enough for.
const (
	whoMay   = "Be root, or a member of group 65700."
	rootOnly = "Only root may do this; the group may only read."
)

// reason is a status in words. Of a connection that could not be made it is
// what the kernel said, without gRPC's layers around it.
func reason(st *status.Status) string {
	text := st.Message()
	if i := strings.Index(text, "dial unix "); st.Code() == codes.Unavailable && i >= 0 {
		return strings.TrimSuffix(text[i:], `"`)
	}
	return text
}
