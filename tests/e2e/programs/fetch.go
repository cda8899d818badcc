// Go's net/http with its default transport, which heeds the proxy variables.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
)

func main() {
	request, err := http.NewRequest("GET", os.Getenv("TARGET_URL")+"/echo", nil)
	check(err)
	request.Header.Set("Authorization", "Bearer "+os.Getenv("API_KEY"))
	response, err := http.DefaultClient.Do(request)
	check(err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	check(err)
	if response.StatusCode != 200 {
		check(fmt.Errorf("status %d: %s", response.StatusCode, body))
	}
	fmt.Println(response.StatusCode, response.Header, string(body))
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
