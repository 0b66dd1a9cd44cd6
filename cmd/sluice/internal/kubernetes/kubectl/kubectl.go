// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kubectl runs kubectl, which has the person's access to a cluster: Sluice's own commands need no client of
// the API, no credentials and no rights in the cluster. Every run has a deadline and a bound of its output, and one
// that hangs is killed.
package kubectl

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/pflag"
	"golang.org/x/sync/errgroup"

	"github.com/sluice-net/sluice/cmd/sluice/internal/invocation"
)

const (
	// grace is what kubectl may take beside the time that the command in the pod has, which says best what hangs.
	grace = 10 * time.Second
	// outputLimit bounds what is kept of one run, in bytes.
	outputLimit = 64 << 20
	// endDelay is how long kubectl may take to end by itself.
	endDelay = 3 * time.Second
)

// Client runs kubectl for one cluster.
type Client struct {
	Program    string
	Context    string
	Kubeconfig string
	Namespace  string // of the DaemonSet
	Parallel   int
	Nodes      []string // those that were chosen; all if there are none

	outputLimit int // 0: the constant of that name

	inv *invocation.Invocation
}

// Flags adds those of the client to commands.
func (c *Client) Flags(f *pflag.FlagSet, inv *invocation.Invocation) {
	c.inv = inv
	f.StringVar(&c.Program, "kubectl", "kubectl", "the program kubectl, by its path or its name in PATH")
	f.StringVar(&c.Context, "context", "", "context of kubectl's configuration")
	f.StringVar(&c.Kubeconfig, "kubeconfig", "", "file of kubectl's configuration")
	f.StringVarP(&c.Namespace, "namespace", "n", "sluice-system", "namespace of Sluice's DaemonSet")
	f.IntVar(&c.Parallel, "parallel", 8, "how many nodes are asked at once")
	f.StringSliceVar(&c.Nodes, "node", nil, "only these nodes")
}

// Check finds mistakes in the flags, before kubectl runs.
func (c *Client) Check() error {
	switch {
	case c.Parallel < 1:
		return invocation.Usagef("--parallel: %d is not positive", c.Parallel)
	case c.Namespace == "":
		return invocation.Usagef("--namespace: empty")
	}
	if _, err := exec.LookPath(c.Program); err != nil {
		return invocation.Usagef("--kubectl: %w; install kubectl, or name it by its path", err)
	}
	return nil
}

// Timeout is how long a command in a pod may take to answer.
func (c *Client) Timeout() time.Duration { return c.inv.Timeout }

// limit is how long kubectl may take for one.
func (c *Client) limit() time.Duration { return c.inv.Timeout + grace }

// args are those of kubectl, those that all of its runs have first.
func (c *Client) args(args []string) []string {
	var all []string
	if c.Context != "" {
		all = append(all, "--context="+c.Context)
	}
	if c.Kubeconfig != "" {
		all = append(all, "--kubeconfig="+c.Kubeconfig)
	}
	return append(all, args...)
}

// Text is a command of kubectl as a person would enter it.
func (c *Client) Text(args ...string) string {
	var words []string
	for _, word := range append([]string{"kubectl"}, c.args(args)...) {
		if strings.ContainsAny(word, " \t'\"\\$&|;<>(){}*?") || word == "" {
			word = "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
		}
		words = append(words, word)
	}
	return strings.Join(words, " ")
}

// ErrNoAnswer is returned if kubectl was killed because its time was over.
var ErrNoAnswer = errors.New("no answer")

// Error is how a run of kubectl failed.
type Error struct {
	Code int // that of the command in the pod, if there was one
	Text string
}

func (e *Error) Error() string { return fmt.Sprintf("%s (exit code %d)", e.Text, e.Code) }

// ExitCode says that the command ended by itself, and how.
func (e *Error) ExitCode() int { return e.Code }

// Run runs kubectl and returns its standard output, which is there also if it fails.
func (c *Client) Run(ctx context.Context, args ...string) ([]byte, error) {
	return c.RunFor(ctx, c.limit(), nil, args...)
}

// RunFor is Run with another limit and with standard input.
func (c *Client) RunFor(ctx context.Context, limit time.Duration, input []byte, args ...string) ([]byte, error) {
	timed, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	cmd := exec.CommandContext(timed, c.Program, c.args(args)...)
	outputLimit := cmp.Or(c.outputLimit, outputLimit)
	stdout, stderr := &bounded{limit: outputLimit}, &bounded{limit: 64 << 10}
	cmd.Stdout, cmd.Stderr = stdout, stderr
	if input != nil {
		cmd.Stdin = bytes.NewReader(input)
	}
	// What kubectl started, such as a plugin for credentials, may have its output open.
	cmd.WaitDelay = endDelay
	err := cmd.Run()
	switch {
	case err == nil && stdout.cut:
		err = fmt.Errorf("the output is longer than %d bytes", outputLimit)
	case ctx.Err() != nil:
		err = ctx.Err()
	case timed.Err() != nil:
		err = fmt.Errorf("%w within %s", ErrNoAnswer, limit)
	case err != nil:
		err = failure(err, stderr.Bytes())
	}
	return stdout.Bytes(), err
}

// Get reads an object or a list.
func (c *Client) Get(ctx context.Context, v any, args ...string) error {
	out, err := c.Run(ctx, append([]string{"get", "--output=json"}, args...)...)
	if err != nil {
		return fmt.Errorf("kubectl get %s: %w", strings.Join(args, " "), err)
	}
	if err := json.Unmarshal(out, v); err != nil {
		return fmt.Errorf("kubectl get %s: %w", strings.Join(args, " "), err)
	}
	return nil
}

// Sluice runs the command `sluice` in the pod of a node, which has --timeout for each answer.
func (c *Client) Sluice(ctx context.Context, n Node, args ...string) ([]byte, error) {
	all, err := c.SluiceArgs(n, false, args...)
	if err != nil {
		return nil, err
	}
	return c.Run(ctx, all...)
}

// SluiceArgs are kubectl's to run the command `sluice` in the pod of a node.
func (c *Client) SluiceArgs(n Node, stdin bool, args ...string) ([]string, error) {
	container, err := n.Container()
	if err != nil {
		return nil, err
	}
	all := []string{"--namespace=" + c.Namespace, "exec", n.Pod.Name, "--container=" + container}
	if stdin {
		all = append(all, "--stdin")
	}
	return append(all, append([]string{"--", "sluice"}, args...)...), nil
}

// Each calls f for every node, --parallel of them at once, and waits for all.
func (c *Client) Each(nodes []Node, f func(i int, n Node)) {
	var answered atomic.Int64
	defer c.inv.Progress(func() string {
		return fmt.Sprintf("%d of %d nodes have answered", answered.Load(),
			len(nodes))
	})()
	var group errgroup.Group
	group.SetLimit(c.Parallel)
	for i, n := range nodes {
		group.Go(func() error {
			f(i, n)
			answered.Add(1)
			return nil
		})
	}
	_ = group.Wait()
}

// Stream runs a command of kubectl that ends when its standard input does, and calls line for each line of its
// output. When ctx ends, it closes the input, and kubectl has a moment to end by itself.
func (c *Client) Stream(ctx context.Context, line func([]byte) error, args ...string) error {
	cmd := exec.CommandContext(ctx, c.Program, c.args(args)...)
	input, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	defer input.Close()
	stderr := &bounded{limit: 64 << 10}
	cmd.Stdout, cmd.Stderr = &lines{each: line}, stderr
	cmd.Cancel = input.Close
	cmd.WaitDelay = endDelay
	err = cmd.Run()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return failure(err, stderr.Bytes())
	}
	return nil
}

// Pipe is Stream for output that has no lines, with standard error. An interrupt of the terminal does not reach
// kubectl, so that what the command in the pod prints at its end still comes; the end of ctx is no error then.
func (c *Client) Pipe(ctx context.Context, out, errOut io.Writer, args ...string) error {
	cmd := exec.CommandContext(ctx, c.Program, c.args(args)...)
	input, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	defer input.Close()
	stderr := &bounded{limit: 64 << 10}
	said := &lines{each: func(line []byte) error {
		_, _ = stderr.Write(append(line, '\n'))
		if !strings.HasPrefix(string(line), "command terminated with exit code") {
			_, _ = errOut.Write(append(line, '\n'))
		}
		return nil
	}}
	cmd.Stdout, cmd.Stderr = out, said
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	ended := false
	cmd.Cancel = func() error {
		ended = true
		return input.Close()
	}
	cmd.WaitDelay = endDelay
	err = cmd.Run()
	if ended && errors.Is(err, context.Canceled) {
		return nil
	}
	if err != nil {
		return failure(err, stderr.Bytes())
	}
	return nil
}

// klogLine begins what the libraries of kubectl log.
var klogLine = regexp.MustCompile(`^[IWEF]\d{4} \d\d:`)

// failure is what kubectl said on standard error, without what is known already and what its libraries log.
func failure(err error, stderr []byte) error {
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return err
	}
	var said, logged []string
	for line := range strings.Lines(string(stderr)) {
		line = strings.TrimSpace(line)
		switch {
		case line == "", strings.HasPrefix(line, "command terminated with exit code"),
			strings.HasPrefix(line, "Defaulted container"):
		case klogLine.MatchString(line):
			logged = append(logged, line)
		default:
			said = append(said, plain(line))
		}
	}
	if len(said) == 0 && len(logged) > 0 {
		said = logged[len(logged)-1:]
	}
	text := strings.Join(said, "; ")
	if text == "" {
		text = "no reason is given"
	}
	return &Error{Code: exit.ExitCode(), Text: text}
}

// plain is the text of an error that `sluice` printed as JSON.
func plain(line string) string {
	var printed struct {
		Error string `json:"error"`
	}
	if json.Unmarshal([]byte(line), &printed) != nil || printed.Error == "" {
		return line
	}
	return strings.ReplaceAll(printed.Error, "\n", " ")
}

// bounded keeps the beginning of what is written. It embeds no buffer: io.Copy would call the buffer's ReadFrom, which
// knows no limit.
type bounded struct {
	kept  bytes.Buffer
	limit int
	cut   bool
}

// Bytes returns the beginning that was kept.
func (b *bounded) Bytes() []byte { return b.kept.Bytes() }

func (b *bounded) String() string { return b.kept.String() }

func (b *bounded) Write(p []byte) (int, error) {
	n := len(p)
	if room := b.limit - b.kept.Len(); room < n {
		b.cut = true
		p = p[:max(room, 0)]
	}
	_, _ = b.kept.Write(p)
	return n, nil
}

// lineLimit bounds a line of a stream.
const lineLimit = 1 << 20

// lines calls each for every line that is written to it, without its end.
type lines struct {
	each func([]byte) error
	part []byte
}

func (l *lines) Write(p []byte) (int, error) {
	n := len(p)
	for {
		i := bytes.IndexByte(p, '\n')
		if i < 0 {
			break
		}
		line := slices.Concat(l.part, p[:i])
		l.part, p = nil, p[i+1:]
		if err := l.each(line); err != nil {
			return 0, err
		}
	}
	if l.part = append(l.part, p...); len(l.part) > lineLimit {
		return 0, io.ErrShortBuffer
	}
	return n, nil
}
