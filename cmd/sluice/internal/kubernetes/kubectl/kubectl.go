// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package kubectl runs kubectl with the user's access to a cluster, so that the commands need no API client and no
// credentials of their own. Every run has a deadline and a limit on its output; a run that hangs is killed.
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
	"github.com/sluice-net/sluice/cmd/sluice/internal/output"
)

const (
	// grace is how long kubectl may take in addition to the timeout of the command in the pod. The command in the pod
	// should time out first, because its error is more precise.
	grace = 10 * time.Second
	// outputLimit limits the output of one run in bytes.
	outputLimit = 64 << 20
	// endDelay is how long kubectl may take to exit by itself.
	endDelay = 3 * time.Second
)

// Client runs kubectl for one cluster.
type Client struct {
	Program    string
	Context    string
	Kubeconfig string
	Namespace  string // of the DaemonSet
	Parallel   int
	Nodes      []string // of --node; empty: all

	outputLimit int // 0: the constant outputLimit

	inv *invocation.Invocation
}

// Flags adds the flags of the client to the flags of a command.
func (c *Client) Flags(f *pflag.FlagSet, inv *invocation.Invocation) {
	c.inv = inv
	f.StringVar(&c.Program, "kubectl", "kubectl", "path of kubectl, or its name in PATH")
	f.StringVar(&c.Context, "context", "", "context in the kubeconfig")
	f.StringVar(&c.Kubeconfig, "kubeconfig", "", "path of the kubeconfig")
	f.StringVarP(&c.Namespace, "namespace", "n", "sluice-system", "namespace of Sluice's DaemonSet")
	f.IntVar(&c.Parallel, "parallel", 8, "number of nodes to ask in parallel")
	f.StringSliceVar(&c.Nodes, "node", nil, "only these nodes")
}

// Check checks the flags before kubectl runs.
func (c *Client) Check() error {
	switch {
	case c.Parallel < 1:
		return invocation.Usagef("--parallel: %d is not positive", c.Parallel)
	case c.Namespace == "":
		return invocation.Usagef("--namespace: empty")
	}
	if _, err := exec.LookPath(c.Program); err != nil {
		return invocation.Usagef("--kubectl: %w; install kubectl, or give its path", err)
	}
	return nil
}

// Timeout is the timeout of a command in a pod.
func (c *Client) Timeout() time.Duration { return c.inv.Timeout }

// limit is the timeout of kubectl when it runs such a command.
func (c *Client) limit() time.Duration { return c.inv.Timeout + grace }

// args returns the arguments of kubectl, beginning with the common ones.
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

// Text returns a kubectl command that users can copy.
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

// ErrNoAnswer is returned if kubectl was killed after its timeout.
var ErrNoAnswer = errors.New("no answer")

// Error is the error of a failed run of kubectl.
type Error struct {
	Code int // exit code of the command in the pod, or of kubectl
	Text string
}

func (e *Error) Error() string { return fmt.Sprintf("%s (exit code %d)", e.Text, e.Code) }

// ExitCode returns the exit code of a command that was not killed.
func (e *Error) ExitCode() int { return e.Code }

// Run runs kubectl and returns its standard output, even on errors.
func (c *Client) Run(ctx context.Context, args ...string) ([]byte, error) {
	return c.RunFor(ctx, c.limit(), nil, args...)
}

// RunFor is Run with the given limit and standard input.
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
	// Child processes of kubectl, such as credential plugins, may keep the output open.
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

// Sluice runs `sluice` in the pod of a node and returns its standard output.
func (c *Client) Sluice(ctx context.Context, n Node, args ...string) ([]byte, error) {
	all, err := c.SluiceArgs(n, false, args...)
	if err != nil {
		return nil, err
	}
	return c.Run(ctx, all...)
}

// SluiceArgs returns the arguments of kubectl to run `sluice` in the pod of a node.
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

// Each calls f for every node, up to --parallel at the same time, and waits for all calls.
func (c *Client) Each(nodes []Node, f func(i int, n Node)) {
	var answered atomic.Int64
	defer c.inv.Progress(func() string {
		return fmt.Sprintf("%d of %s answered", answered.Load(), output.Plural(len(nodes), "node has", "nodes have"))
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

// Stream runs a kubectl command and calls line for each line of output. The command must exit when its standard input
// ends. When ctx ends, Stream closes the input, and kills kubectl if it does not exit within endDelay.
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

// Pipe is Stream for binary output, and also copies standard error. An interrupt from the terminal does not reach
// kubectl, so that the last output of the command in the pod still arrives. It is not an error if ctx ends.
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

// klogLine matches log lines of kubectl's libraries.
var klogLine = regexp.MustCompile(`^[IWEF]\d{4} \d\d:`)

// failure returns an error with the text on kubectl's standard error, without log lines and redundant lines.
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

// plain returns the text of an error that `sluice` printed as JSON.
func plain(line string) string {
	var printed struct {
		Error string `json:"error"`
	}
	if json.Unmarshal([]byte(line), &printed) != nil || printed.Error == "" {
		return line
	}
	return strings.ReplaceAll(printed.Error, "\n", " ")
}

// bounded keeps the beginning of the written data. It does not embed a buffer, because io.Copy would call the
// buffer's ReadFrom, which ignores the limit.
type bounded struct {
	kept  bytes.Buffer
	limit int
	cut   bool
}

// Bytes returns the kept data.
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

// lineLimit limits a line of a stream in bytes.
const lineLimit = 1 << 20

// lines calls each for every written line, without the newline.
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
